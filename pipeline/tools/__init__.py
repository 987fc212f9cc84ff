"""Tools: black boxes from arguments to one short string, and the executor that runs them."""
