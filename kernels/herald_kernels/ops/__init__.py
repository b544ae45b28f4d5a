"""One folder an operation: the public function, its torch reference and its Triton kernel."""
