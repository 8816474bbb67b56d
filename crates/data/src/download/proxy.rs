//! Which proxy a request goes through, from the usual environment variables.

use std::net::IpAddr;

/// `http_proxy`, `https_proxy` and `all_proxy` (small letters first, then capitals), but for hosts of `no_proxy`: names with
/// their subdomains, addresses, `*`. `HTTP_PROXY` in capitals is not looked at where a web server could have set it (CGI).
pub(super) fn proxy_of(url: &str, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let variable = |name: &str| variable(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
    let either = |name: &str| variable(name).or_else(|| variable(&name.to_ascii_uppercase()));
    let (scheme, rest) = url.split_once("://")?;
    let host = host_of(rest);
    let is_exempt = |entry: &str| {
        let entry = entry.trim().trim_start_matches("*.").trim_start_matches('.').to_ascii_lowercase();
        let same_address = entry.parse::<IpAddr>().is_ok_and(|e| host.parse() == Ok(e));
        entry == "*"
            || same_address
            || host == entry
            || (!entry.is_empty() && host.ends_with(&format!(".{entry}")))
    };
    // No proxy elsewhere can reach this machine's own address.
    let is_own = host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback());
    if is_own || either("no_proxy").is_some_and(|list| list.split([',', ' ']).any(is_exempt)) {
        return None;
    }
    let own = match scheme {
        "http" if variable("REQUEST_METHOD").is_some() => variable("http_proxy"),
        "http" => either("http_proxy"),
        _ => either("https_proxy"),
    };
    own.or_else(|| either("all_proxy"))
}

/// The host of what follows `://`, in small letters, without user, port and brackets.
fn host_of(rest: &str) -> String {
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    let host = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    host.to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_decides() {
        let with = |url: &str, set: &[(&str, &str)]| {
            proxy_of(url, |name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
        };
        let found = |proxy: &str| Some(proxy.to_owned());
        assert_eq!(with("http://a/x", &[]), None);
        assert_eq!(with("http://a/x", &[("http_proxy", "p:1"), ("HTTP_PROXY", "q:1")]), found("p:1"));
        assert_eq!(with("http://a/x", &[("HTTP_PROXY", "q:1")]), found("q:1"));
        assert_eq!(with("http://a/x", &[("HTTP_PROXY", "q:1"), ("REQUEST_METHOD", "GET")]), None);
        assert_eq!(with("https://a/x", &[("http_proxy", "p:1")]), None);
        assert_eq!(with("https://a/x", &[("ALL_PROXY", "p:1"), ("https_proxy", "")]), found("p:1"));
        for (url, list) in [
            ("http://u@A.example:80/x", "b, a.example"),
            ("http://b.a.example/x", ".a.example"),
            ("http://b.a.example/x", "*.a.example"),
            ("http://[2001:db8::1]:80/x", "2001:DB8:0::1"),
            ("http://10.0.0.1:9/x", "localhost,10.0.0.1"),
            ("http://127.0.0.1:9/x", "b"),
            ("http://localhost/x", "b"),
            ("http://any/x", "*"),
        ] {
            assert_eq!(with(url, &[("http_proxy", "p:1"), ("no_proxy", list)]), None, "{url} {list}");
        }
        let set = [("http_proxy", "p:1"), ("NO_PROXY", "a.example,,x")];
        assert_eq!(with("http://ba.example/x", &set), found("p:1"));
    }
}
