"""What requests may ask for, and what they carry on their way to the scheduler."""
