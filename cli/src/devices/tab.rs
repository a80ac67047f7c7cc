//! Browser tabs.

use std::io::{IsTerminal, stderr};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use kyklos::Error;
use kyklos::backend::DeviceInfo;
use kyklos::backend::wgpu::KernelChoice;
use kyklos_tab::{TabBackend, TabServer, TabServerOptions};
use qrcode::QrCode;
use qrcode::render::unicode::Dense1x2;

use super::backend::BackendEntry;
use crate::failure::{Failure, Result, note};
use crate::options::{List, ListItem};

/// How browser tabs come in.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Options of browser tabs (--device tab)")]
pub(crate) struct TabArgs {
    /// Where the page is served, tab.html of demos/browser/ of the same release: https, or http on the machine of the browser [default:
    /// http://localhost:8000/tab.html]
    #[arg(long, value_name = "URL")]
    pub(crate) tab_page: Option<String>,
    /// UDP addresses of this machine that browsers connect to, the first one first; without a port, any free one [default:
    /// 127.0.0.1, for a browser on this machine]
    #[arg(long, value_name = "IP[:PORT],…")]
    pub(crate) tab_address: Option<List<TabAddress>>,
}

/// An address, with or without a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TabAddress(SocketAddr);

impl ListItem for TabAddress {
    fn item(text: &str) -> Result<Self, Error> {
        let address = text.parse().or_else(|_| text.parse().map(|ip: IpAddr| SocketAddr::new(ip, 0)));
        match address {
            Ok(address) if !address.ip().is_unspecified() => Ok(Self(address)),
            _ => Err(Error::request(
                format!("`{text}` is no address that a browser can connect to"),
                "give an IP address of this machine, with or without a port, such as 192.168.1.7:4000",
            )),
        }
    }
}

impl TabArgs {
    /// Refuses options that no rank needs.
    pub(crate) fn refuse_without_tabs(&self) -> Result<()> {
        let given = [("--tab-page", self.tab_page.is_some()), ("--tab-address", self.tab_address.is_some())];
        match given.into_iter().find(|(_, given)| *given) {
            Some((option, _)) => {
                Err(Failure::request(format!("{option} without a tab"), "add --device tab, or leave it away"))
            }
            None => Ok(()),
        }
    }

    /// Lets tabs in from now on.
    pub(crate) fn let_in(&self, patience: Duration) -> Result<()> {
        let addresses: Vec<SocketAddr> = match &self.tab_address {
            Some(List(addresses)) => addresses.iter().map(|TabAddress(address)| *address).collect(),
            None => vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))],
        };
        let options = TabServerOptions {
            bind: bind(&addresses),
            addresses,
            page: self.tab_page.clone().unwrap_or_else(|| PAGE.to_owned()),
        };
        let mut host = HOST.lock().unwrap_or_else(PoisonError::into_inner);
        *host = Some(Host { server: TabServer::start(&options)?, patience });
        Ok(())
    }
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
    type Backend = TabBackend;

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
    fn open(_: usize, _: KernelChoice) -> Result<TabBackend> {
        let (invitation, patience) = {
            let host = HOST.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(Host { server, patience }) = &*host else {
                return Err(Failure::request(
                    "--device tab in a command that lets no tab in",
                    "use kyklos attend",
                ));
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
        let tab = invitation.wait(patience)?;
        note(&format!("a tab has come: {}", kyklos::backend::Backend::info(&tab).name));
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
            let addresses: Vec<_> = texts.iter().map(|text| TabAddress::item(text).unwrap().0).collect();
            bind(&addresses).to_string()
        };
        assert_eq!(bind_of(&["127.0.0.1"]), "127.0.0.1:0");
        assert_eq!(bind_of(&["[::1]:7"]), "[::1]:7");
        assert_eq!(bind_of(&["192.168.1.7"]), "0.0.0.0:0");
        assert_eq!(bind_of(&["192.168.1.7", "10.0.0.1:4000"]), "0.0.0.0:4000");
        assert_eq!(bind_of(&["192.168.1.7:1", "fd00::1"]), "[::]:1");
        for wrong in ["", "localhost", "0.0.0.0:4", "::", "1.2.3.4:", "1.2.3.4:99999"] {
            assert!(TabAddress::item(wrong).is_err(), "{wrong}");
        }
    }
}
