//! `/debug/pprof` and `/debug/flags`, which upstream serves by default. Profiles of a Go process do not exist here: the
//! pages say so in upstream's codes, and no flag is changed.

use http::{HeaderValue, Method, StatusCode, header};

use crate::body::{self, Answer, not_found};

/// The answer of a path under `/debug/`.
pub fn route(method: &Method, path: &str) -> Answer {
    match path {
        "/debug/pprof" => {
            let mut answer = html("<a href=\"/debug/pprof/\">Found</a>.\n\n".to_owned());
            *answer.status_mut() = StatusCode::FOUND;
            let location = HeaderValue::from_static("/debug/pprof/");
            answer.headers_mut().insert(header::LOCATION, location);
            answer
        }
        "/debug/pprof/" => {
            let mut answer = page("/debug/pprof/", "No profiles: this is not a Go process.<br>\n");
            nosniff(&mut answer);
            answer
        }
        "/debug/pprof/symbol" => body::text(StatusCode::OK, "num_symbols: 0\n"),
        "/debug/flags/v" if method == Method::PUT => plain(
            StatusCode::BAD_REQUEST,
            "the log level is set when the server is started",
        ),
        "/debug/flags/v" => plain(StatusCode::NOT_ACCEPTABLE, "unsupported http method"),
        path if path.starts_with("/debug/pprof/") => {
            let mut answer = body::text(StatusCode::NOT_FOUND, "Unknown profile\n");
            answer
                .headers_mut()
                .insert("x-go-pprof", HeaderValue::from_static("1"));
            answer
        }
        path if path == "/debug/flags" || path.starts_with("/debug/flags/") => page(
            "/debug/flags/",
            "<br>\nflags:<br>\n<table>\n<tr>v<br>\n</table>\n<br>\nfull flags configurable<br>\n",
        ),
        _ => not_found(),
    }
}

fn page(title: &str, text: &str) -> Answer {
    html(format!(
        "<html>\n<head>\n<title>{title}</title>\n</head>\n<body>\n{title}<br>\n{text}</body>\n</html>\n"
    ))
}

fn html(text: String) -> Answer {
    body::answer(StatusCode::OK, "text/html; charset=utf-8", text)
}

fn plain(code: StatusCode, text: &'static str) -> Answer {
    let mut answer = body::answer(code, "text/plain", format!("{text}\n"));
    nosniff(&mut answer);
    answer
}

fn nosniff(answer: &mut Answer) {
    answer
        .headers_mut()
        .insert("x-content-type-options", HeaderValue::from_static("nosniff"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages() {
        let check = |method: Method, path: &str, code: u16, kind: &str| {
            let answer = route(&method, path);
            let found = answer.headers()[header::CONTENT_TYPE].to_str().unwrap();
            assert_eq!((answer.status().as_u16(), found), (code, kind), "{method} {path}");
        };
        let (html, text) = ("text/html; charset=utf-8", "text/plain; charset=utf-8");
        check(Method::GET, "/debug/pprof", 302, html);
        check(Method::GET, "/debug/pprof/", 200, html);
        check(Method::GET, "/debug/pprof/heap", 404, text);
        check(Method::POST, "/debug/flags", 200, html);
        check(Method::GET, "/debug/flags/v", 406, "text/plain");
        check(Method::PUT, "/debug/flags/v", 400, "text/plain");
        check(Method::GET, "/debug/", 404, text);
    }
}
