//! CRI's image calls.

use super::Daemon;
use super::record::now_nanos;
use super::status::image_view;
use crate::image::{Credentials, Error, silent, split_auth};
use skiff_cri::v1 as cri;
use std::pin::Pin;
use tonic::{Request, Response, Status};

fn status(error: Error) -> Status {
    match &error {
        Error::Pull { not_found: true, .. } | Error::NotFound(_) => Status::not_found(error.to_string()),
        Error::Pull {
            unauthorized: true, ..
        } => Status::unauthenticated(error.to_string()),
        Error::Reference(..) => Status::invalid_argument(error.to_string()),
        Error::Unsupported(_) => Status::unimplemented(error.to_string()),
        _ => Status::unknown(error.to_string()),
    }
}

fn credentials(auth: cri::AuthConfig) -> Result<Credentials, Status> {
    let (mut username, mut password) = (auth.username, auth.password);
    if username.is_empty() && auth.identity_token.is_empty() && !auth.auth.is_empty() {
        (username, password) = split_auth(&auth.auth).ok_or_else(|| {
            Status::invalid_argument("invalid registry credentials: auth is not base64 of user:password")
        })?;
    }
    Ok(Credentials {
        username,
        password,
        identity_token: auth.identity_token,
        registry_token: auth.registry_token,
        server_address: auth.server_address,
    })
}

impl Daemon {
    fn images_matching(&self, filter: Option<cri::ImageFilter>) -> Result<Vec<cri::Image>, Status> {
        let wanted = filter
            .and_then(|filter| filter.image)
            .map(|image| image.image)
            .unwrap_or_default();
        if wanted.is_empty() {
            return Ok(self
                .images
                .list()
                .map_err(status)?
                .iter()
                .map(image_view)
                .collect());
        }
        Ok(self
            .images
            .find(&wanted)
            .map_err(status)?
            .iter()
            .map(image_view)
            .collect())
    }
}

#[tonic::async_trait]
impl skiff_cri::ImageService for Daemon {
    async fn list_images(
        &self,
        request: Request<cri::ListImagesRequest>,
    ) -> Result<Response<cri::ListImagesResponse>, Status> {
        let images = self.images_matching(request.into_inner().filter)?;
        Ok(Response::new(cri::ListImagesResponse { images }))
    }

    type StreamImagesStream =
        Pin<Box<dyn futures::Stream<Item = Result<cri::StreamImagesResponse, Status>> + Send + 'static>>;

    async fn stream_images(
        &self,
        request: Request<cri::StreamImagesRequest>,
    ) -> Result<Response<Self::StreamImagesStream>, Status> {
        let images = self.images_matching(request.into_inner().filter)?;
        let parts = images.chunks(super::runtime_service::STREAM_CHUNK);
        let parts: Vec<_> = parts
            .map(|part| {
                Ok(cri::StreamImagesResponse {
                    images: part.to_vec(),
                })
            })
            .collect();
        Ok(Response::new(Box::pin(futures::stream::iter(parts))))
    }

    async fn image_status(
        &self,
        request: Request<cri::ImageStatusRequest>,
    ) -> Result<Response<cri::ImageStatusResponse>, Status> {
        let request = request.into_inner();
        let wanted = request.image.unwrap_or_default().image;
        // COMPAT: an image that is not there is an empty answer, not an error.
        let image = self.images.find(&wanted).map_err(status)?;
        let mut info = std::collections::HashMap::new();
        if request.verbose
            && let Some(image) = &image
            && let Ok(text) = serde_json::to_string(image)
        {
            info.insert("info".to_owned(), text);
        }
        Ok(Response::new(cri::ImageStatusResponse {
            image: image.as_ref().map(image_view),
            info,
        }))
    }

    async fn pull_image(
        &self,
        request: Request<cri::PullImageRequest>,
    ) -> Result<Response<cri::PullImageResponse>, Status> {
        let request = request.into_inner();
        let reference = request.image.unwrap_or_default().image;
        let auth = request.auth.map(credentials).transpose()?;
        let image_ref = self
            .images
            .pull(&reference, auth.as_ref(), &silent())
            .await
            .map_err(status)?;
        Ok(Response::new(cri::PullImageResponse { image_ref }))
    }

    async fn remove_image(
        &self,
        request: Request<cri::RemoveImageRequest>,
    ) -> Result<Response<cri::RemoveImageResponse>, Status> {
        let reference = request.into_inner().image.unwrap_or_default().image;
        let images = self.images.clone();
        tokio::task::spawn_blocking(move || {
            // COMPAT: removing by any name removes the image, as the kubelet's collector expects.
            match images.find(&reference)? {
                Some(image) => images.remove(&image.id),
                None => Ok(()),
            }
        })
        .await
        .map_err(|error| Status::internal(error.to_string()))?
        .map_err(status)?;
        Ok(Response::new(cri::RemoveImageResponse {}))
    }

    async fn image_fs_info(
        &self,
        _: Request<cri::ImageFsInfoRequest>,
    ) -> Result<Response<cri::ImageFsInfoResponse>, Status> {
        let (bytes, inodes) = self.images.usage();
        let usage = |path: &std::path::Path, bytes: u64, inodes: u64| cri::FilesystemUsage {
            timestamp: now_nanos(),
            fs_id: Some(cri::FilesystemIdentifier {
                mountpoint: path.to_string_lossy().into_owned(),
            }),
            used_bytes: Some(cri::UInt64Value { value: bytes }),
            inodes_used: Some(cri::UInt64Value { value: inodes }),
        };
        let containers = self.config.containers();
        let at = containers.clone();
        let of_containers = tokio::task::spawn_blocking(move || skiff_fs::disk_usage(&at))
            .await
            .map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(cri::ImageFsInfoResponse {
            image_filesystems: vec![usage(self.images.root(), bytes, inodes)],
            container_filesystems: vec![usage(&containers, of_containers.bytes, of_containers.inodes)],
        }))
    }
}
