//! Label selectors over typed objects.

pub(crate) use skiff_pods::labels::*;
