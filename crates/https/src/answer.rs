//! What came back, and what upstream's client makes of it.

use bytes::Bytes;
use serde_json::Value;

/// So much of an answer is quoted, as upstream does.
const QUOTED: usize = 2048;

#[derive(Debug, Clone)]
pub struct Answer {
    pub code: u16,
    pub content_type: String,
    /// Where else to ask.
    pub location: Option<String>,
    /// It asks to be called again.
    pub retry_after: bool,
    pub body: Bytes,
}

impl Answer {
    pub fn is_success(&self) -> bool {
        self.code / 100 == 2
    }

    /// The document of a success; otherwise what upstream's client says.
    pub fn document(&self) -> Result<Value, String> {
        if !self.is_success() {
            return Err(self.refusal());
        }
        if self.body.is_empty() {
            return Err(format!(
                "0-length response with status code: {} and content type: {}",
                self.code, self.content_type
            ));
        }
        // COMPAT: upstream takes what is no JSON for the YAML of a string.
        serde_json::from_slice(&self.body).map_err(|_| {
            "couldn't get version/kind; json parse error: json: cannot unmarshal string into Go value of type struct { APIVersion string \"json:\\\"apiVersion,omitempty\\\"\"; Kind string \"json:\\\"kind,omitempty\\\"\" }".to_owned()
        })
    }

    /// The same, if it is of the kind that was asked for; one that says nothing of its kind is.
    pub fn document_of(&self, kind: &str) -> Result<Value, String> {
        let document = self.document()?;
        match document["kind"].as_str() {
            None | Some("") => Ok(document),
            Some(found) if found == kind => Ok(document),
            Some(found) => Err(format!("unexpected kind {found:?} in the answer, not {kind:?}")),
        }
    }

    fn refusal(&self) -> String {
        let told: Option<Value> = serde_json::from_slice(&self.body).ok();
        let status = told.as_ref().filter(|told| told["kind"] == "Status");
        if let Some(message) = status.and_then(|status| status["message"].as_str()) {
            return message.to_owned();
        }
        let is_text = self.content_type.is_empty() || self.content_type.starts_with("text/");
        let told = if is_text {
            let start = &self.body[..self.body.len().min(QUOTED)];
            String::from_utf8_lossy(start).trim().to_owned()
        } else {
            "unknown".to_owned()
        };
        match self.code {
            400 => "the server rejected our request for an unknown reason".to_owned(),
            403 | 406 | 415 => told,
            409 => "the server reported a conflict".to_owned(),
            422 => "the server rejected our request due to an error in our request".to_owned(),
            429 => "the server has received too many requests and has asked us to try again later".to_owned(),
            503 => "the server is currently unable to handle the request".to_owned(),
            504 => "the server was unable to return a response in the time allotted, but may still be processing the request".to_owned(),
            401 => "the server has asked for the client to provide credentials".to_owned(),
            404 => "the server could not find the requested resource".to_owned(),
            405 => "the server does not allow this method on the requested resource".to_owned(),
            500.. => format!("an error on the server ({told:?}) has prevented the request from succeeding"),
            code => {
                format!("the server responded with the status code {code} but did not return more information")
            }
        }
    }
}
