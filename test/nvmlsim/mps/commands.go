package mps

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// words collects a command's output. Some lines go to the user who sent the command and to the log,
// others only to the log.
type words struct {
	log   *logger
	shown strings.Builder
}

func (w *words) sayf(format string, args ...any) {
	w.notef(format, args...)
	fmt.Fprintf(&w.shown, format+"\n", args...)
}

func (w *words) notef(format string, args ...any) { w.log.printf(format, args...) }

// command runs one command line of a user and returns true if the daemon must end. It returns no
// error, because the real program prints errors and exits with success.
func (c *control) command(user uint32, line string, w *words) (done bool) {
	fields := strings.Fields(line)
	if len(fields) == 0 {
		fields = []string{""}
	}
	name, args := fields[0], fields[1:]
	if name == "quit" {
		return c.quitCommand(user, args, w)
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	switch name {
	case "get_server_list":
		if c.server != nil && c.server.failed == nil {
			w.sayf("%d", c.server.pid)
		}
	case "start_server":
		c.startCommand(user, args, w)
	case "get_device_client_list":
		c.deviceClientList(args, w)
	case "ps":
		c.snapshot(args, w)
	case "get_default_active_thread_percentage":
		w.sayf("%s", formatThreads(c.defaults.Threads))
	case "set_default_active_thread_percentage":
		if c.mayChange(user, w) {
			setThreads(&c.defaults, argument(args, 0), w)
		}
	case "get_default_device_pinned_mem_limit":
		getMemory(&c.defaults, argument(args, 0), w)
	case "set_default_device_pinned_mem_limit":
		if c.mayChange(user, w) {
			setMemory(&c.defaults, argument(args, 0), argument(args, 1), w)
		}
	default:
		c.serverCommand(user, name, args, w)
	}
	return false
}

// serverCommand runs a command whose first argument is the PID of a server.
func (c *control) serverCommand(user uint32, name string, args []string, w *words) {
	do, known := map[string]func(*server){
		"get_server_status": func(s *server) { w.sayf("%s", s.status()) },
		"get_client_list": func(s *server) {
			for _, client := range s.clients {
				w.sayf("%d", client.PID)
			}
		},
		"shutdown_server":              func(s *server) { c.shutdown(user, s, args, w) },
		"terminate_client":             func(s *server) { terminate(user, s, args, w) },
		"get_active_thread_percentage": func(s *server) { w.sayf("%s", formatThreads(s.limits.Threads)) },
		"get_device_pinned_mem_limit":  func(s *server) { getMemory(&s.limits, argument(args, 1), w) },
		"set_active_thread_percentage": func(s *server) {
			if s.mayBeChangedBy(user, "change settings for another user's server", w) {
				setThreads(&s.limits, argument(args, 1), w)
				c.sendLimits(s)
			}
		},
		"set_device_pinned_mem_limit": func(s *server) {
			if s.mayBeChangedBy(user, "change settings for another user's server", w) {
				setMemory(&s.limits, argument(args, 1), argument(args, 2), w)
				c.sendLimits(s)
			}
		},
	}[name]
	if !known || (name == "get_server_status" && c.driver.Release() < releaseStatus) {
		w.sayf("Unknown command %q", name)
		return
	}
	s := c.find(args, w)
	switch {
	case s != nil:
		do(s)
	case name == "terminate_client":
		w.sayf("Server %d not found!", number(argument(args, 0)))
		w.sayf("1")
	}
}

func argument(args []string, i int) string {
	if i < len(args) {
		return args[i]
	}
	return ""
}

// number parses the digits at the start of text, like atoi in C. Without digits it returns 0.
func number(text string) int {
	digits := len(text) - len(strings.TrimLeft(text, "0123456789"))
	value, err := strconv.Atoi(text[:digits])
	if err != nil {
		return 0
	}
	return value
}

// find returns the running server whose PID is the first of args. If there is none, find adds a
// message to w and returns nil.
func (c *control) find(args []string, w *words) *server {
	pid := number(argument(args, 0))
	if c.server == nil || c.server.pid != pid || c.server.failed != nil {
		w.sayf("Server %d not found", pid)
		return nil
	}
	return c.server
}

// mayChange reports whether user may change the daemon's settings: root and the daemon's own user
// may. Drivers before 550 let every user do it. A refusal prints a message.
func (c *control) mayChange(user uint32, w *words) bool {
	if user == 0 || user == uint32(os.Getuid()) || c.driver.Release() < releasePrivileges {
		return true
	}
	w.sayf(
		"Insufficient privileges for UID %d. Control deamon settings can only be modified by the user started it or by the root user.",
		user,
	)
	return false
}

func (s *server) mayBeChangedBy(user uint32, do string, w *words) bool {
	if user == 0 || user == s.user {
		return true
	}
	w.sayf("Insufficient privileges for UID %d. Only the root user may %s.", user, do)
	return false
}

func (s *server) status() string {
	if s.ready {
		return "ACTIVE"
	}
	return "INITIALIZING"
}

// sendLimits sends the server its limits and waits until the server has applied them.
func (c *control) sendLimits(s *server) {
	limits := s.limits.clone()
	s.sent++
	number := s.sent
	_ = s.orders.encoder.Encode(order{Limits: &limits, Number: number})
	for c.server == s && s.failed == nil && s.applied < number {
		c.changed.Wait()
	}
}

// setThreads sets the thread percentage. It prints the percentage that is then in force, even if it
// refuses text.
func setThreads(limits *Limits, text string, w *words) {
	if value, err := parseThreads(text); err == nil {
		limits.Threads = value
	} else {
		w.notef("Invalid percentage, expected between (0.0, 100.0]")
	}
	w.sayf("%s", formatThreads(limits.Threads))
}

// ordinal parses a device number. It refuses UUIDs, as the real program does.
func ordinal(text string, w *words) (int, bool) {
	device, err := strconv.Atoi(text)
	if err != nil || device < 0 || device >= maxOrdinals {
		w.notef("Invalid device ordinal!")
		return 0, false
	}
	return device, true
}

func getMemory(limits *Limits, device string, w *words) {
	at, valid := ordinal(device, w)
	if !valid {
		return
	}
	if mib := limits.Memory[at]; mib > 0 {
		w.sayf("%s", formatMemory(mib))
	} else {
		w.notef("No default pinned memory limit set for the device!")
	}
}

// setMemory sets the memory limit of a device. Like the real program, it tells the user nothing,
// even if it refuses the device.
func setMemory(limits *Limits, device, text string, w *words) {
	if at, valid := ordinal(device, w); valid {
		limits.Memory[at] = readMemory(text)
	}
}

func (c *control) startCommand(user uint32, args []string, w *words) {
	of, err := strconv.ParseUint(argument(args, 1), 10, 32)
	if argument(args, 0) != "-uid" || err != nil {
		w.sayf("A user id (UID) is required to start a new server")
		return
	}
	if user != 0 && uint64(user) != of {
		w.sayf("Insufficient privileges for UID %d. Only the root user may start server for another user.", user)
		return
	}
	if c.multiUser {
		of = 0
	}
	if c.server != nil && c.server.failed == nil {
		return
	}
	c.startServer(uint32(of))
	c.server.wanted = true
	for c.server != nil && !c.server.ready && c.server.failed == nil {
		c.changed.Wait()
	}
	if c.server != nil && c.server.failed != nil {
		w.notef("%v", c.server.failed)
		c.server = nil
	}
}

func (c *control) shutdown(user uint32, s *server, args []string, w *words) {
	if !s.mayBeChangedBy(user, "shutdown another user's server", w) {
		return
	}
	if argument(args, 1) == "-f" {
		w.notef("Force shutting down server %d", s.pid)
		_ = s.process.Kill()
	} else {
		s.drain()
	}
	for c.server == s {
		c.changed.Wait()
	}
}

func terminate(user uint32, s *server, args []string, w *words) {
	if s.mayBeChangedBy(user, "terminate clients on another user's server", w) {
		_ = s.orders.encoder.Encode(order{Terminate: number(argument(args, 1))})
	}
}

// quitCommand ends the daemon after its clients have ended, or after the time that -t gives. It
// returns false if the user may not end the daemon.
func (c *control) quitCommand(user uint32, args []string, w *words) bool {
	if user != 0 && user != uint32(os.Getuid()) {
		w.sayf("Not enough privilege to execute quit command")
		return false
	}
	wait := time.Duration(-1)
	if argument(args, 0) == "-t" {
		wait = time.Duration(number(argument(args, 1))) * time.Second
	}
	c.quit(wait)
	return true
}

// quit makes the daemon refuse new clients, and returns when no server runs. A server ends with its
// last client; if wait is not negative, quit kills the server after that time.
func (c *control) quit(wait time.Duration) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.ending = true
	c.changed.Broadcast()
	if c.server == nil || c.server.process == nil {
		return
	}
	s := c.server
	s.drain()
	if wait >= 0 {
		timer := time.AfterFunc(wait, func() { _ = s.process.Kill() })
		defer timer.Stop()
	}
	for c.server == s && s.failed == nil {
		c.changed.Wait()
	}
}
