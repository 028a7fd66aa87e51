"""The namespace of the Triton kernels' ops, which is unique to a build."""

from ..._ops import add_op_namespace_prefix

NAMESPACE = add_op_namespace_prefix("").removesuffix("::")
