"""The namespace of the Triton kernels' ops.

A file of its own, as each build for the Hugging Face Hub (``hub/``) has a namespace of its own.
"""

NAMESPACE = "klfast_triton"
