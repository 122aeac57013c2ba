"""How one micro-batch's Gauss-Newton product is computed: by dual numbers, or by finite differences."""
