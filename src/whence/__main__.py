"""``python -m whence``."""

from whence.cli import main

if __name__ == "__main__":
    main()
