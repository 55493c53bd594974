//! The plan over objects as JSON.
