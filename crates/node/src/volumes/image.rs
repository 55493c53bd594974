//! `image`: the files of an image. The runtime mounts it, and there is nothing of it in the pod's directory.

use std::path::PathBuf;

use async_trait::async_trait;

use super::volume_type::{Ready, VolumeType, Wanted};
use super::{SetUpError, Volumes};

pub(super) struct Image;

#[async_trait]
impl VolumeType for Image {
    fn name(&self) -> &'static str {
        "image"
    }

    fn handles(&self, wanted: &Wanted<'_>) -> bool {
        wanted.volume.image.is_some()
    }

    async fn set_up(&self, _: &Volumes, _: &Wanted<'_>) -> Result<Ready, SetUpError> {
        Ok(Ready::files(PathBuf::new()))
    }
}
