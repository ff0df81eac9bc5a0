package mps

import (
	"fmt"
	"slices"
	"strings"
)

// deviceClientList runs the command get_device_client_list, which prints the PIDs of the clients on
// each device. Without a server it prints no device.
func (c *control) deviceClientList(args []string, w *words) {
	if len(args) > 0 && c.find(args, w) == nil || c.server == nil {
		return
	}
	var devices []string
	on := map[string][]string{}
	for _, client := range c.server.clients {
		for _, device := range client.Devices {
			if !slices.Contains(devices, device) {
				devices = append(devices, device)
			}
			on[device] = append(on[device], fmt.Sprint(client.PID))
		}
	}
	for _, device := range devices {
		w.sayf("%s: %s", device, strings.Join(on[device], " "))
	}
}

// snapshot runs the command ps: it prints a table of clients. Unlike the real program, the stand-in
// does not know the clients' PID namespaces.
func (c *control) snapshot(args []string, w *words) {
	if argument(args, 0) == "-p" {
		if c.find(args[1:], w) == nil {
			w.sayf("Server %d not found\n", number(argument(args, 1)))
			return
		}
	}
	if c.server == nil || c.server.failed != nil {
		w.sayf("Server not found")
		return
	}
	w.sayf("%-9s %-5s %-9s %-18s %s", "PID", "ID", "SERVER", "DEVICE", "COMMAND")
	for _, client := range c.server.clients {
		for _, device := range client.Devices {
			w.sayf("%-9d %-5d %-9d %-18.22s %s", client.PID, client.ID, c.server.pid, device, client.Command)
		}
	}
}
