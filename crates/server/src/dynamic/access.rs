//! `authorizer` in expressions: the server's own authorizer, asked for the user of the request or for a service
//! account.

use std::sync::Arc;

use skiff_admission::{Attributes, User};
use skiff_auth::{Authorizer, UserInfo};
use skiff_cel::{AccessReview, Decision};

pub struct Access {
    authorizer: Arc<Authorizer>,
    user: UserInfo,
}

impl Access {
    /// The authorizer for the user of the request, and the request's own resource.
    pub fn of(
        authorizer: &Arc<Authorizer>,
        attributes: &Attributes<'_>,
    ) -> (Arc<dyn skiff_cel::Authorizer>, AccessReview) {
        let User {
            name,
            uid,
            groups,
            extra,
        } = attributes.user.clone();
        let access = Access {
            authorizer: authorizer.clone(),
            user: UserInfo {
                name,
                uid,
                groups,
                extra,
            },
        };
        let review = AccessReview {
            group: attributes.group.to_owned(),
            resource: attributes.resource.to_owned(),
            subresource: attributes.subresource.to_owned(),
            namespace: attributes.namespace.to_owned(),
            name: attributes.name.to_owned(),
            ..AccessReview::default()
        };
        (Arc::new(access), review)
    }
}

impl skiff_cel::Authorizer for Access {
    fn authorize(&self, review: &AccessReview) -> Decision {
        let own;
        let user = match &review.service_account {
            None => &self.user,
            Some((namespace, name)) => {
                own = UserInfo::new(
                    format!("system:serviceaccount:{namespace}:{name}"),
                    [
                        "system:serviceaccounts".to_owned(),
                        format!("system:serviceaccounts:{namespace}"),
                    ],
                );
                &own
            }
        };
        let decision = self.authorizer.authorize(
            user,
            &skiff_auth::Attributes {
                verb: &review.verb,
                is_resource: review.path.is_none(),
                group: &review.group,
                version: "*",
                resource: &review.resource,
                subresource: &review.subresource,
                namespace: &review.namespace,
                name: &review.name,
                path: review.path.as_deref().unwrap_or(""),
                field_selector: &review.field_selector,
                label_selector: &review.label_selector,
            },
        );
        Decision {
            allowed: decision.allowed,
            reason: decision.reason,
            error: decision.error,
        }
    }
}
