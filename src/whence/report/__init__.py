"""What pages are made of: documents, figures, numbers in words. Nothing here needs torch, the model or the data."""
