package cluster

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
)

func route(t *testing.T, destination string) netlink.Route {
	t.Helper()
	if destination == "" {
		return netlink.Route{}
	}
	_, parsed, err := net.ParseCIDR(destination)
	if err != nil {
		t.Fatal(err)
	}
	return netlink.Route{Dst: parsed}
}

func TestNetworkAvoidsHostRoutes(t *testing.T) {
	for _, test := range []struct {
		name, destination string
		overlaps          bool
	}{
		{"no destination", "", false},
		{"the default route", "0.0.0.0/0", false},
		{"another private network", "10.10.0.0/16", false},
		{"another cluster's", "10.199.4.0/24", false},
		{"the machines' own", "10.199.3.0/24", true},
		{"a part of the Pods'", "10.103.7.0/24", true},
		{"one that holds both", "10.0.0.0/8", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := (network{Slot: 3}).overlaps([]netlink.Route{route(t, test.destination)}); got != test.overlaps {
				t.Errorf("overlap is %t, want %t", got, test.overlaps)
			}
		})
	}
}

func TestNamesAndAddressesFit(t *testing.T) {
	const longestLinkName = 15 // the kernel's limit, less the final zero
	last := network{Slot: slots - 1}
	if name := last.link(maxNodes); len(name) > longestLinkName {
		t.Errorf("link name %s is too long for the kernel", name)
	}
	for _, address := range []string{last.address(maxNodes), last.gateway()} {
		if net.ParseIP(address) == nil {
			t.Errorf("%s is no address", address)
		}
	}
	if _, _, err := net.ParseCIDR(last.pods(maxNodes)); err != nil {
		t.Error(err)
	}
}
