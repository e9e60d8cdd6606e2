"""NVIDIA NeMo Automodel with balanced batches: its VLM recipe, named in its YAML (`recipe.py`).

A folder of its own: Automodel may run the recipe's file as a script, and Python then finds what lies beside
it before everything else, as `transformers.py` of dflop's integrations.
"""
