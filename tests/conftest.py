"""Shared set-up: one thread per worker, so that parallel workers do not fight over the cores."""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # read when numpy and torch are imported, here and by programs that tests start

import torch  # noqa: E402

torch.set_num_threads(1)
