"""Parts of kernels, traced by the CuTe DSL: copies, matrix products, masks, softmax."""
