//! Run: arguments in, exit status out.
