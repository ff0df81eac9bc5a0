package supervisor

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps/namespace"
)

// The test binary is also the programs that the tests run: gpu-mps, and the driver's control daemon and server.
func TestMain(m *testing.M) {
	switch name := filepath.Base(os.Args[0]); {
	case name == controlProgram:
		os.Exit(fakeControl(os.Args[1:]))
	case name == serverProgram:
		fakeServer()
	case len(os.Args) > 2 && os.Args[1] == "daemon":
		view, err := namespace.Parse(os.Args[2])
		if err == nil {
			err = namespace.Exec(view, os.Args[3:], os.Environ())
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	case len(os.Args) > 3 && os.Args[1] == "join":
		fmt.Fprintln(os.Stderr, join(os.Args[2:]))
		os.Exit(1)
	case len(os.Args) > 2 && os.Args[1] == "supervise":
		os.Exit(superviseForTest(os.Args[2]))
	}
	os.Exit(m.Run())
}

// behaviour is what the fake control daemon does that a good one does not. It is in a file of the driver root.
type behaviour struct {
	// Hang: it starts and never listens.
	Hang []string `json:"hang,omitempty"` // the devices for which it does
	// Deaf: it listens and never answers. IgnoreQuit, IgnoreTerm: what it does not obey.
	Deaf, IgnoreQuit, IgnoreTerm bool
	// Forget: limits that are set read back as another value.
	Forget bool
	// Exit: it ends at once with these words.
	Exit string
	// Server: it starts a server at once, as with a first client.
	Server bool
	// Old: it has no option for several users.
	Old bool
}

const behaviourFile = "/tmp/driver/behaviour.json"

// fakeControl answers as nvidia-cuda-mps-control 535 and 550 do: the forms of its answers were taken from the real ones.
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

// fakeClient passes its input to the daemon.
func fakeClient() int {
	conn, err := net.Dial("unix", filepath.Join(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "control"))
	if err != nil {
		fmt.Println("Cannot find MPS control daemon process")
		return 1
	}
	_, _ = io.Copy(conn, os.Stdin)
	_, _ = io.Copy(os.Stdout, conn)
	return 0
}

// fakeServer stays, whatever happens to its daemon.
func fakeServer() { forever() }

func forever() {
	never := make(chan os.Signal, 1)
	signal.Notify(never, syscall.SIGUSR1)
	<-never
}

func superviseForTest(text string) int {
	var o Options
	err := json.Unmarshal([]byte(text), &o)
	if err == nil {
		ctx, stop := signal.NotifyContext(contextForTest(), syscall.SIGTERM)
		defer stop()
		err = Run(ctx, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
