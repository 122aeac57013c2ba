"""How well peers predict retraining on our works, at their defaults and over ten dampings each.

Every peer lives in an environment of its own, which `make peers` makes beside ours. By hand, for one of them:

    python3 -m venv .venv-kronfluence
    .venv-kronfluence/bin/python -m pip install -c constraints.txt -e '.[demo]'
    .venv-kronfluence/bin/python -m pip install -c constraints.txt --no-deps -r benchmarks/peers/kronfluence.txt
    OMP_NUM_THREADS=1 .venv-kronfluence/bin/python -m benchmarks.peers.kronfluence --check
    OMP_NUM_THREADS=1 .venv-kronfluence/bin/python -m benchmarks.peers.kronfluence [NAME …]

That trains each work on all of its data and leaves the peer's scores in ``runs/peers``: what is there is not asked
again, what was interrupted goes on. Then, in our environment,

    python -m benchmarks.peers.ours [NAME …]
    python -m benchmarks.peers.plain [NAME …]
    python -m benchmarks.peers [NAME …]

ask whence, and what needs no library, compare all with the ground truth, add to
``benchmarks/results/peers_damping.json`` and show tables. Who there is says `benchmarks.peers.roster`.

    python -m benchmarks.peers.interleaved [NAME …]

measures whence and the peers at their defaults in turn, with their memory.

    python -m benchmarks.peers.page

writes ``benchmarks/PEERS.md``, its figure and README's table from all of these.

The best of ten dampings is picked by the ground truth itself, which no user has: it is a bound on what tuning could
bring, and favours the peer.
"""
