"""Speed and memory of whence, beside a plain gradient and beside its peers."""
