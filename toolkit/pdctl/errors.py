"""The one exception that commands end with on purpose."""


class PdctlError(Exception):
    """Something the user can act on. Printed as one message, without a traceback.

    Args:
        message: what, where and what to do next.
        code: exit status; 1 when the operation failed, 2 when it could not be tried.
    """

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code
