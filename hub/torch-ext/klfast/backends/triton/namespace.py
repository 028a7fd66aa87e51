"""The namespace of the Triton kernels' ops, which no other build has."""

from ..._ops import add_op_namespace_prefix

NAMESPACE = add_op_namespace_prefix("").removesuffix("::")
