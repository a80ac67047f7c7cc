//! Browser tabs.

use std::io::{IsTerminal, stderr};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kyklos::backend::wgpu::KernelChoice;
use kyklos::backend::{Device, DeviceInfo};
use kyklos_tab::{TabServer, TabServerOptions};
use qrcode::QrCode;
use qrcode::render::unicode::Dense1x2;

use super::backend::BackendEntry;
use crate::activity;
use crate::failure::{Failure, Result, note};

/// Lets tabs in from now on: prints links to `page`, which connects to one of `addresses`. A tab
/// may take so long to come.
pub(crate) fn let_in(page: Option<&str>, addresses: &[SocketAddr], patience: Duration) -> Result<()> {
    let local = [SocketAddr::from((Ipv4Addr::LOCALHOST, 0))];
    let addresses = if addresses.is_empty() { &local } else { addresses };
    let options = TabServerOptions {
        bind: bind(addresses),
        addresses: addresses.to_vec(),
        page: page.unwrap_or(PAGE).to_owned(),
    };
    let mut host = HOST.lock().unwrap_or_else(PoisonError::into_inner);
    *host = Some(Host { server: TabServer::start(&options)?, patience });
    Ok(())
}

/// One address as it is; of several, all of the machine, with the port of the first that has one.
fn bind(addresses: &[SocketAddr]) -> SocketAddr {
    let port = addresses.iter().map(SocketAddr::port).find(|port| *port != 0).unwrap_or(0);
    match addresses {
        [one] if one.ip().is_loopback() => *one,
        _ if addresses.iter().all(SocketAddr::is_ipv4) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)),
        _ => SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)),
    }
}

/// The failure of a command that waits for no tab.
pub(crate) fn let_in_nowhere() -> Failure {
    Failure::request("--device tab in a command that lets no tab in", "use kyklos attend")
}

/// Tells the tabs of devices that are dropped that the work is over. Lets no tab in after this.
pub(crate) fn say_goodbye() {
    drop(HOST.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// Lets the tabs of this process in.
struct Host {
    server: TabServer,
    /// Longest wait for a tab.
    patience: Duration,
}

static HOST: Mutex<Option<Host>> = Mutex::new(None);

#[derive(Debug)]
pub(crate) struct Tab;

impl BackendEntry for Tab {
    const NAME: &'static str = "tab";
    const NUMBERED: bool = false;

    /// None: nobody knows which tabs will come.
    fn devices() -> Vec<DeviceInfo> {
        Vec::new()
    }

    fn choose(_: Option<usize>, _: usize) -> Result<usize> {
        Ok(0)
    }

    /// Prints a link, and waits for the tab.
    fn open(_: usize, _: KernelChoice) -> Result<Device> {
        let (invitation, patience) = {
            let host = HOST.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(Host { server, patience }) = &*host else {
                return Err(let_in_nowhere());
            };
            (server.invite()?, *patience)
        };
        let link = invitation.link();
        let code = match stderr().is_terminal() {
            true => QrCode::new(link)
                .map(|code| format!("\n{}", code.render::<Dense1x2>().build()))
                .unwrap_or_default(),
            false => String::new(),
        };
        note(&format!("open this link in a browser, in a tab of its own; it works once:\n{link}{code}"));
        activity::doing("waiting for a browser tab");
        let tab = Device::from(invitation.wait(patience)?);
        note(&format!("a tab has come: {}", tab.info().name));
        Ok(tab)
    }
}

/// Where the README of the page serves it.
const PAGE: &str = "http://localhost:8000/tab.html";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_address_is_listened_at_alone() {
        let bind_of = |texts: &[&str]| {
            let addresses: Vec<_> = texts.iter().map(|text| text.parse().unwrap()).collect();
            bind(&addresses).to_string()
        };
        assert_eq!(bind_of(&["127.0.0.1:0"]), "127.0.0.1:0");
        assert_eq!(bind_of(&["[::1]:7"]), "[::1]:7");
        assert_eq!(bind_of(&["192.168.1.7:0"]), "0.0.0.0:0");
        assert_eq!(bind_of(&["192.168.1.7:0", "10.0.0.1:4000"]), "0.0.0.0:4000");
        assert_eq!(bind_of(&["192.168.1.7:1", "[fd00::1]:0"]), "[::]:1");
    }
}
