"""What bad input raises, and what a doubtful plan warns of."""


class InputError(ValueError):
    """Input that breaks a rule: the message carries the name, the value, the rule and the remedy.

    The command line prints it on one line and exits with 2; nothing has been written when it is
    raised.
    """


class PlanWarning(UserWarning):
    """A plan that holds, but not as it was asked for: the message says what was done instead."""
