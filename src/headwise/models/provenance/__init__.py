"""From which tensors a tensor was computed: the kind of attention, and attention that is written out by hand."""
