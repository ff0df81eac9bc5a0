package cluster

import (
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// network computes the names and addresses of one cluster from the number Slot, which differs
// between the clusters on a host.
type network struct {
	Slot int `json:"slot"`
}

// slots is how many clusters can run on one host.
const slots = 50

func (n network) bridge() string           { return fmt.Sprintf("gpudra%d", n.Slot) }
func (n network) link(machine int) string  { return fmt.Sprintf("gpudra%d-%d", n.Slot, machine) }
func (n network) machines() string         { return fmt.Sprintf("10.199.%d.0/24", n.Slot) }
func (n network) gateway() string          { return fmt.Sprintf("10.199.%d.1", n.Slot) }
func (n network) address(index int) string { return fmt.Sprintf("10.199.%d.%d", n.Slot, 2+index) }

// pods returns the Pod network of the machine with this index. The control plane has index 0 and
// runs no Pods.
func (n network) pods(index int) string { return fmt.Sprintf("10.%d.%d.0/24", 100+n.Slot, index) }

// chooseNetwork returns the network with the first Slot that no other cluster has and whose
// addresses no route of the host uses. It returns an error if there is none.
func chooseNetwork(taken map[int]bool) (network, error) {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return network{}, fmt.Errorf("list the host's routes: %w", err)
	}
	for slot := range slots {
		candidate := network{Slot: slot}
		if !taken[slot] && !candidate.overlaps(routes) {
			return candidate, nil
		}
	}
	return network{}, fmt.Errorf(
		"no free network for the cluster: the host uses all of 10.199.0.0/16 and 10.100.0.0/16 to 10.%d.0.0/16, or %d clusters are up",
		99+slots,
		slots,
	)
}

func (n network) overlaps(routes []netlink.Route) bool {
	for _, own := range []string{n.machines(), fmt.Sprintf("10.%d.0.0/16", 100+n.Slot)} {
		_, wanted, err := net.ParseCIDR(own)
		if err != nil {
			return true
		}
		for _, route := range routes {
			if route.Dst == nil || route.Dst.IP.IsUnspecified() {
				continue
			}
			if wanted.Contains(route.Dst.IP) || route.Dst.Contains(wanted.IP) {
				return true
			}
		}
	}
	return false
}

// build creates the bridge that connects the machines.
func (n network) build() error {
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: n.bridge()}}
	if err := netlink.LinkAdd(bridge); err != nil {
		return fmt.Errorf("create bridge %s: %w (root rights are needed)", n.bridge(), err)
	}
	link, err := netlink.LinkByName(n.bridge())
	if err != nil {
		return fmt.Errorf("find bridge %s: %w", n.bridge(), err)
	}
	address, err := netlink.ParseAddr(n.gateway() + "/24")
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(link, address); err != nil {
		return fmt.Errorf("give bridge %s its address: %w", n.bridge(), err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("switch bridge %s on: %w", n.bridge(), err)
	}
	return nil
}

// remove deletes the bridge and every network cable. The kernel deletes their routes.
func (n network) remove() error {
	links, err := netlink.LinkList()
	// The kernel interrupts the list if another cluster adds or removes a link meanwhile.
	for tries := 0; errors.Is(err, netlink.ErrDumpInterrupted) && tries < 100; tries++ {
		links, err = netlink.LinkList()
	}
	if err != nil {
		return fmt.Errorf("list the host's links: %w", err)
	}
	for _, link := range links {
		name := link.Attrs().Name
		if name != n.bridge() && !strings.HasPrefix(name, n.bridge()+"-") {
			continue
		}
		if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("remove link %s: %w", name, err)
		}
	}
	return nil
}
