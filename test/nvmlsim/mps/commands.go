package mps

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// obey serves the socket of those who may give orders.
func (c *control) obey(connection *conn) {
	for {
		var asked request
		if connection.decoder.Decode(&asked) != nil {
			return
		}
		if err := c.driver.Meet("mpsControlCommand"); err != nil {
			_ = connection.encoder.Encode(answer{Text: err.Error() + "\n"})
			continue
		}
		words := strings.Fields(asked.Command)
		if len(words) == 0 {
			_ = connection.encoder.Encode(answer{})
			continue
		}
		text, err := c.command(words[0], words[1:])
		if err != nil {
			text = err.Error() + "\n"
		}
		c.log.printf("Command %q: %s", asked.Command, strings.TrimSpace(text))
		done := words[0] == "quit" && err == nil
		_ = connection.encoder.Encode(answer{Text: text, Done: done})
		if done {
			close(c.ended)
			return
		}
	}
}

// need checks how many arguments there are.
func need(args []string, least, most int) error {
	if len(args) < least || len(args) > most {
		return errArguments
	}
	return nil
}

// command carries one out and gives what the program prints.
func (c *control) command(name string, args []string) (string, error) {
	if name == "quit" {
		return "", c.quitCommand(args)
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	switch name {
	case "get_server_list":
		if c.server == nil || c.server.failed != nil {
			return "", need(args, 0, 0)
		}
		return fmt.Sprintln(c.server.pid), need(args, 0, 0)
	case "get_server_status":
		return c.serverStatus(args)
	case "start_server":
		return "", c.startCommand(args)
	case "shutdown_server":
		return "", c.shutdownCommand(args)
	case "get_client_list":
		return c.clientList(args)
	case "get_device_client_list":
		return c.deviceClientList(args)
	case "ps":
		return c.snapshot(args)
	case "terminate_client":
		return "", c.terminateCommand(args)
	case "get_default_active_thread_percentage":
		return formatThreads(c.defaults.Threads) + "\n", need(args, 0, 0)
	case "set_default_active_thread_percentage":
		return setThreads(&c.defaults, args)
	case "get_default_device_pinned_mem_limit":
		return c.getMemory(&c.defaults, args)
	case "set_default_device_pinned_mem_limit":
		return "", c.setMemory(&c.defaults, args)
	}
	return c.serverLimits(name, args)
}

// serverLimits are the commands on the limits of one server.
func (c *control) serverLimits(name string, args []string) (string, error) {
	known := map[string]bool{"get_active_thread_percentage": true, "set_active_thread_percentage": true, "get_device_pinned_mem_limit": true, "set_device_pinned_mem_limit": true}
	if !known[name] {
		return "", messagef("Unknown command: %s", name)
	}
	s, err := c.find(args)
	if err != nil {
		return "", err
	}
	var text string
	switch name {
	case "get_active_thread_percentage":
		return formatThreads(s.limits.Threads) + "\n", nil
	case "get_device_pinned_mem_limit":
		return c.getMemory(&s.limits, args[1:])
	case "set_active_thread_percentage":
		text, err = setThreads(&s.limits, args[1:])
	case "set_device_pinned_mem_limit":
		err = c.setMemory(&s.limits, args[1:])
	}
	if err == nil {
		limits := s.limits.clone()
		_ = s.orders.encoder.Encode(order{Limits: &limits})
	}
	return text, err
}

func setThreads(limits *Limits, args []string) (string, error) {
	if err := need(args, 1, 1); err != nil {
		return "", err
	}
	value, err := parseThreads(args[0])
	if err != nil {
		return "", err
	}
	limits.Threads = value
	return formatThreads(value) + "\n", nil
}

func (c *control) getMemory(limits *Limits, args []string) (string, error) {
	if err := need(args, 1, 1); err != nil {
		return "", err
	}
	ordinal, err := c.ordinal(args[0])
	if err != nil {
		return "", err
	}
	mib, set := limits.Memory[ordinal]
	if !set {
		return "0M\n", nil
	}
	return formatMemory(mib) + "\n", nil
}

func (c *control) setMemory(limits *Limits, args []string) error {
	if err := need(args, 2, 2); err != nil {
		return err
	}
	ordinal, err := c.ordinal(args[0])
	if err != nil {
		return err
	}
	mib, err := parseMemory(args[1])
	if err != nil {
		return err
	}
	limits.Memory[ordinal] = mib
	return nil
}

// find gives the running server with this PID.
func (c *control) find(args []string) (*server, error) {
	if len(args) == 0 {
		return nil, errArguments
	}
	pid, err := strconv.Atoi(args[0])
	if err != nil || c.server == nil || c.server.pid != pid || c.server.failed != nil {
		return nil, messagef("Server %s not found", args[0])
	}
	return c.server, nil
}

func (c *control) serverStatus(args []string) (string, error) {
	s, err := c.find(args)
	if err != nil {
		return "", err
	}
	if s.ready {
		return "ACTIVE\n", nil
	}
	return "INITIALIZING\n", nil
}

func (c *control) startCommand(args []string) error {
	if len(args) != 2 || args[0] != "-uid" {
		return errArguments
	}
	user, err := strconv.ParseUint(args[1], 10, 32)
	if err != nil {
		return errArguments
	}
	if c.multiUser {
		user = 0
	}
	if c.server != nil && c.server.failed == nil {
		return messagef("Server %d of user %d is already running", c.server.pid, c.server.user)
	}
	c.startServer(uint32(user))
	c.server.wanted = true
	for c.server != nil && !c.server.ready && c.server.failed == nil {
		c.changed.Wait()
	}
	if c.server == nil {
		return errors.New("the server ended before it was ready: see server.log")
	}
	if failed := c.server.failed; failed != nil {
		c.server = nil
		return failed
	}
	return nil
}

func (c *control) shutdownCommand(args []string) error {
	s, err := c.find(args)
	if err != nil {
		return err
	}
	if len(args) == 2 && args[1] == "-f" {
		_ = s.process.Kill()
	} else {
		s.drain()
	}
	for c.server == s {
		c.changed.Wait()
	}
	return nil
}

func (c *control) terminateCommand(args []string) error {
	s, err := c.find(args)
	if err != nil {
		return err
	}
	if err := need(args, 2, 2); err != nil {
		return err
	}
	pid, err := strconv.Atoi(args[1])
	if err != nil {
		return errArguments
	}
	return s.orders.encoder.Encode(order{Terminate: pid})
}

// quitCommand ends the daemon. Without a time it waits for the clients, as the real one does.
func (c *control) quitCommand(args []string) error {
	wait := time.Duration(-1)
	if len(args) > 0 {
		seconds := 0
		var err error
		if len(args) == 2 && args[0] == "-t" {
			seconds, err = strconv.Atoi(args[1])
		} else {
			err = errArguments
		}
		if err != nil || seconds < 0 {
			return errArguments
		}
		wait = time.Duration(seconds) * time.Second
	}
	c.quit(wait)
	return nil
}

// quit lets nobody in any more and returns when no server is left: when the last client has gone, or, after a time that is not negative, by force.
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
		timer := time.AfterFunc(wait, func() { _ = s.process.Signal(os.Kill) })
		defer timer.Stop()
	}
	for c.server == s && !s.over() {
		c.changed.Wait()
	}
}

// over: the process is gone, and what is left is the reason for those who waited for it.
func (s *server) over() bool { return s.failed != nil }
