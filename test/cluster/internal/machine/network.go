package machine

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// connect creates the machine's network cable, a veth pair. One end is on the host's bridge, the
// other is eth0 in the network namespace of process pid.
func connect(network Network, pid int) error {
	bridge, err := netlink.LinkByName(network.Bridge)
	if err != nil {
		return fmt.Errorf("find bridge %s: %w", network.Bridge, err)
	}
	cable := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: network.HostLink, MasterIndex: bridge.Attrs().Index, Flags: net.FlagUp},
		PeerName:      "eth0",
		PeerNamespace: netlink.NsPid(pid),
	}
	if err := netlink.LinkAdd(cable); err != nil {
		return fmt.Errorf("create link %s: %w", network.HostLink, err)
	}
	link, err := netlink.LinkByName(network.HostLink)
	if err != nil {
		return fmt.Errorf("find link %s: %w", network.HostLink, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("switch link %s on: %w", network.HostLink, err)
	}
	address, _, err := net.ParseCIDR(network.Address)
	if err != nil {
		return err
	}
	for _, destination := range network.HostRoutes {
		if err := addRoute(bridge, destination, address.String()); err != nil {
			return err
		}
	}
	return nil
}

// configureNetwork gives the machine its addresses and routes. It runs in the machine.
func configureNetwork(network Network) error {
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	ethernet, err := netlink.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("find eth0: %w", err)
	}
	for _, link := range []netlink.Link{loopback, ethernet} {
		if err := netlink.LinkSetUp(link); err != nil {
			return fmt.Errorf("switch %s on: %w", link.Attrs().Name, err)
		}
	}
	if err := addAddress(ethernet, network.Address); err != nil {
		return err
	}
	for _, address := range network.Loopback {
		if err := addAddress(loopback, address); err != nil {
			return err
		}
	}
	if err := addRoute(ethernet, "0.0.0.0/0", network.Gateway); err != nil {
		return err
	}
	for _, route := range network.Routes {
		if err := addRoute(ethernet, route.Destination, route.Via); err != nil {
			return err
		}
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
}

func addAddress(link netlink.Link, address string) error {
	parsed, err := netlink.ParseAddr(address)
	if err != nil {
		return fmt.Errorf("address %q of %s: %w", address, link.Attrs().Name, err)
	}
	if err := netlink.AddrAdd(link, parsed); err != nil {
		return fmt.Errorf("give %s the address %s: %w", link.Attrs().Name, address, err)
	}
	return nil
}

func addRoute(link netlink.Link, destination, via string) error {
	_, network, err := net.ParseCIDR(destination)
	if err != nil {
		return fmt.Errorf("route: %w", err)
	}
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: network, Gw: net.ParseIP(via)}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("route %s via %s: %w", destination, via, err)
	}
	return nil
}

// disconnect removes the machine's network cable by deleting the end that is on the host. The
// kernel removes the cable too, but only a little after the machine's last process has ended.
func disconnect(hostLink string) error {
	link, err := netlink.LinkByName(hostLink)
	if err != nil {
		var missing netlink.LinkNotFoundError
		if errors.As(err, &missing) {
			return nil
		}
		return fmt.Errorf("find link %s: %w", hostLink, err)
	}
	if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove link %s: %w", hostLink, err)
	}
	return nil
}
