"""Token files, the sources they are made from, and the batches drawn from them."""
