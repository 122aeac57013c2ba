"""`clean`: likely mislabelled or harmful training examples, by self-influence."""
