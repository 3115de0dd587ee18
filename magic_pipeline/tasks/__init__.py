"""What is attributed: the Task protocol and the ready-made tasks.

The only room that imports transformers or scikit-learn, each inside the one task that needs it. How a model is trained
or walked does not belong here.
"""
