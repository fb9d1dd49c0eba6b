"""Loading: bit-equal, strict, accounted for; what stays untouched, what stays tied, and how a job resumes."""
