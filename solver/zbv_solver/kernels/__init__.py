"""How compiled kernels are made, and the arrays that they take. A kernel is in the module that calls it."""
