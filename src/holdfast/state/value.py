"""A placeholder in a state that is loaded. Knows nothing."""


class Value:
    """Takes whatever a checkpoint has in its place: a value, a tensor, or all that is nested there.

    Put it into the state that `load` fills; the load replaces it. Tensors come back on the CPU.

    Example::

        state = {"model": model, "optimizer": holdfast.Value()}
        holdfast.load("runs/a/step-00001000", into=state)
        print(state["optimizer"]["param_groups"])
    """

    def __repr__(self) -> str:
        return "holdfast.Value()"
