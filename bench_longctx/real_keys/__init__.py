"""How much attention a selected set holds, on the keys and queries of a real pretrained language model."""
