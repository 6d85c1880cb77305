"""What is checked and settled before an engine serves: arguments, the model, and choices made by self-checks."""
