"""The ops that compiled backends implement: schemas, loading, autograd."""
