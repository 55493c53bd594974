//! What controllers ask of a pod: its state.

pub(crate) use skiff_pods::state::*;
