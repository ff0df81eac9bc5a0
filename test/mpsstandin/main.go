// Command mpsstandin fakes the driver's MPS programs in tests of package mps/supervisor. It acts as
// the program by whose name it is called: the MPS server, or else the control daemon with the
// faults that a test chose. Called as "join", it runs a program as another user in the mount
// namespace of a process.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const serverProgram = "nvidia-cuda-mps-server"

func main() {
	switch filepath.Base(os.Args[0]) {
	case serverProgram:
		forever() // A real server outlives its daemon too.
	case "join":
		fmt.Println(join(os.Args[1], os.Args[2], os.Args[3:]))
		os.Exit(1)
	default:
		os.Exit(fakeControl(os.Args[1:]))
	}
}

// join executes command as the user with this ID in the mount namespace of process pid.
func join(pid, user string, command []string) error {
	runtime.LockOSThread()
	id, err := strconv.Atoi(user)
	if err != nil {
		return err
	}
	ns, err := os.Open(filepath.Join("/proc", pid, "ns/mnt"))
	if err != nil {
		return err
	}
	if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS)); err != nil {
		return err
	}
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(id), syscall.Setuid(id)); err != nil {
		return err
	}
	return syscall.Exec(command[0], append([]string{filepath.Base(command[0])}, command[1:]...), os.Environ())
}

// behaviour lists the faults of the fake control daemon. A test writes it to a file in the driver
// root.
type behaviour struct {
	// Hang lists devices for which the daemon starts and never listens.
	Hang []string `json:"hang,omitempty"`
	// Deaf makes the daemon listen but never answer. IgnoreQuit makes it ignore the command quit, and
	// IgnoreTerm the signal SIGTERM.
	Deaf, IgnoreQuit, IgnoreTerm bool
	// Forget makes the daemon report another memory limit than the one that was set.
	Forget bool
	// Exit is a text that the daemon prints before it ends at its start. If Exit is empty, the daemon
	// runs.
	Exit string
	// Server makes the daemon start a server at once, as a real one does for its first client.
	Server bool
	// Old makes the daemon behave like one of a driver that does not know the option for several
	// users.
	Old bool
}

const behaviourFile = "/tmp/driver/behaviour.json"

// fakeControl acts as the control daemon, or as its client if the arguments do not ask for a
// daemon. It answers in the format of nvidia-cuda-mps-control 535 and 550.
func fakeControl(args []string) int {
	var b behaviour
	if data, err := os.ReadFile(behaviourFile); err == nil {
		if err := json.Unmarshal(data, &b); err != nil {
			fmt.Println(err)
			return 3
		}
	}
	options := strings.Join(args, " ")
	if options == "" || b.Old && options != "-f" {
		return fakeClient()
	}
	if b.Exit != "" {
		fmt.Println(b.Exit)
		return 1
	}
	if b.IgnoreTerm {
		signal.Ignore(syscall.SIGTERM)
	}
	devices := os.Getenv("CUDA_VISIBLE_DEVICES")
	for _, d := range b.Hang {
		if strings.Contains(devices, d) {
			forever()
		}
	}
	fmt.Println("Starting control daemon with options", options, "devices", devices)
	if b.Server {
		server := exec.Command(serverProgram)
		if err := server.Start(); err != nil {
			fmt.Println("no server:", err)
		}
	}
	pipe := filepath.Join(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "control")
	_ = os.Remove(pipe)
	listener, err := net.Listen("unix", pipe)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	answers := &answers{behaviour: b, limits: map[string]string{}, threads: "100.0"}
	for {
		conn, err := listener.Accept()
		if err != nil {
			return 1
		}
		if b.Deaf {
			continue
		}
		command, _ := bufio.NewReader(conn).ReadString('\n')
		fmt.Println("Cmd:" + strings.TrimSpace(command))
		_, _ = io.WriteString(conn, answers.to(strings.Fields(command)))
		_ = conn.Close()
		if strings.HasPrefix(command, "quit") && !b.IgnoreQuit {
			return 0
		}
	}
}

type answers struct {
	behaviour
	limits  map[string]string
	threads string
}

func (a *answers) to(words []string) string {
	switch {
	case len(words) == 1 && words[0] == "get_server_list", len(words) == 3 && words[0] == "quit":
		return ""
	case len(words) == 2 && words[0] == "set_default_active_thread_percentage":
		a.threads = words[1] + ".0"
		return a.threads + "\n"
	case len(words) == 1 && words[0] == "get_default_active_thread_percentage":
		return a.threads + "\n"
	case len(words) == 3 && words[0] == "set_default_device_pinned_mem_limit":
		if !a.Forget {
			a.limits[words[1]] = inWholeUnits(words[2])
		}
		return ""
	case len(words) == 2 && words[0] == "get_default_device_pinned_mem_limit":
		if limit, ok := a.limits[words[1]]; ok {
			return limit + "\n"
		}
		return "No default pinned memory limit set for the device!\n"
	}
	return fmt.Sprintf("Unknown command %q\n", strings.Join(words, " "))
}

func inWholeUnits(limit string) string {
	var mib int
	if _, err := fmt.Sscanf(limit, "%dM", &mib); err != nil || mib < 1024 {
		return limit
	}
	return fmt.Sprintf("%dG", mib/1024)
}

// fakeClient forwards its standard input to the fake control daemon and prints the answer.
func fakeClient() int {
	conn, err := net.Dial("unix", filepath.Join(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "control"))
	if err != nil {
		fmt.Println("Cannot find MPS control daemon process")
		return 1
	}
	_, _ = io.Copy(conn, os.Stdin)
	if c, ok := conn.(*net.UnixConn); ok {
		_ = c.CloseWrite() // Otherwise the daemon would wait for more commands.
	}
	_, _ = io.Copy(os.Stdout, conn)
	return 0
}

func forever() {
	never := make(chan os.Signal, 1)
	signal.Notify(never, syscall.SIGUSR1)
	<-never
}
