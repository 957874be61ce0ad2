"""Why a model cannot be served. Each message is one line for the person who named the model.

ModelError
├── ModelNotFound      no such file, folder or hub id, or it could not be fetched
├── ModelDamaged       truncated, wrong hash, tensors missing or of the wrong shape
└── ModelUnsupported   whole, but something we do not implement
"""

from __future__ import annotations

__all__ = ["ModelDamaged", "ModelError", "ModelNotFound", "ModelUnsupported"]


class ModelError(Exception):
    """Catch this one; the start of a worker ends with its text."""


class ModelNotFound(ModelError):
    pass


class ModelDamaged(ModelError):
    pass


class ModelUnsupported(ModelError):
    pass
