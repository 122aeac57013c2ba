"""The paper's tables and figures, one module each: what it claims, what was measured here, whether it holds."""
