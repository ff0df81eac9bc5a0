package mps

import (
	"fmt"
	"slices"
	"strings"
)

func (c *control) clientList(args []string) (string, error) {
	if err := need(args, 1, 1); err != nil {
		return "", err
	}
	s, err := c.find(args)
	if err != nil {
		return "", err
	}
	var text strings.Builder
	for _, client := range s.clients {
		fmt.Fprintln(&text, client.PID)
	}
	return text.String(), nil
}

// deviceClientList says of each device who computes on it.
func (c *control) deviceClientList(args []string) (string, error) {
	if len(args) > 0 {
		if _, err := c.find(args); err != nil {
			return "", err
		}
	}
	if c.server == nil {
		return "", nil
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
	var text strings.Builder
	for _, device := range devices {
		fmt.Fprintf(&text, "%s: %s\n", device, strings.Join(on[device], " "))
	}
	return text.String(), nil
}

// snapshot is the table of ps. The stand-in knows no namespaces of clients.
func (c *control) snapshot(args []string) (string, error) {
	if len(args) == 2 && args[0] == "-p" {
		args = args[1:]
	}
	if len(args) > 0 {
		if _, err := c.find(args); err != nil {
			return "", err
		}
	}
	var text strings.Builder
	fmt.Fprintf(&text, "%-9s %-5s %-9s %-18s %s\n", "PID", "ID", "SERVER", "DEVICE", "COMMAND")
	if c.server != nil {
		for _, client := range c.server.clients {
			for _, device := range client.Devices {
				fmt.Fprintf(&text, "%-9d %-5d %-9d %-18.22s %s\n", client.PID, client.ID, c.server.pid, device, client.Command)
			}
		}
	}
	return text.String(), nil
}
