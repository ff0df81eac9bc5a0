//go:build cluster

// These tests start clusters, as root: go test -tags cluster ./test/cluster. The first run builds
// the cluster's programs.
package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// name is the name of this test's cluster. It is unlikely to be the name of a cluster that a
// developer runs on the same host.
const name = "selftest"

func TestMain(m *testing.M) {
	if os.Getenv("CLUSTER_TEST_UP") != "" {
		// A test starts this binary again as a child process with CLUSTER_TEST_UP set, and kills that
		// child while it brings a cluster up.
		_, err := cluster.Up(context.Background(), cluster.Options{Name: name, Nodes: make([]cluster.NodeOptions, 2)})
		if err != nil {
			println(err.Error())
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func up(t *testing.T, options cluster.Options) *cluster.Cluster {
	t.Helper()
	options.Name, options.Output = name, t.Output()
	t.Cleanup(func() {
		if t.Failed() {
			kept := filepath.Join(os.TempDir(), "cluster-test-logs")
			t.Logf("logs are in %s (%v)", kept, cluster.SaveLogs(name, kept))
		}
		if err := cluster.Down(context.Background(), name); err != nil {
			t.Error(err)
		}
		nothingIsLeft(t)
	})
	rising, err := cluster.Up(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	return rising
}

// nothingIsLeft fails the test if a file, mount, process or cgroup of the cluster is left. It looks
// for them with its own code, because Down's code could overlook them.
func nothingIsLeft(t *testing.T) {
	t.Helper()
	const state = "/var/lib/gpu-dra-driver-cluster/" + name
	if _, err := os.Stat(state); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is left (%v)", state, err)
	}
	if mounts, _ := os.ReadFile("/proc/self/mountinfo"); bytes.Contains(mounts, []byte(state)) {
		t.Error("a mount is left")
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range commands {
		if command, _ := os.ReadFile(path); bytes.Contains(command, []byte(state)) {
			t.Errorf("process %s is left: %q", path, command)
		}
	}
	err = filepath.WalkDir("/sys/fs/cgroup", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() && strings.HasSuffix(path, "gpu-dra-driver-cluster/"+name) {
			t.Errorf("cgroup %s is left", path)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// must returns a function for calls such as must(t)(node.Exec(…)). That function returns the call's
// output, and ends the test if the call returned an error.
func must(t *testing.T) func(output string, err error) string {
	t.Helper()
	return func(output string, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return output
	}
}

const pod = `apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 0
  containers:
  - name: main
    image: ` + cluster.TestImage + `
    command: [sh, -c, "echo booted; exec sleep 1000000"]
`

func runPod(t *testing.T, c *cluster.Cluster, podName, node string) {
	t.Helper()
	command, err := c.ClientCommand(t.Context(), "kubectl", "apply", "-f", "-")
	if err != nil {
		t.Fatal(err)
	}
	command.Stdin = strings.NewReader(strings.NewReplacer("NAME", podName, "NODE", node).Replace(pod))
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("create Pod %s: %v: %s", podName, err, output)
	}
	must(t)(c.Kubectl(t.Context(), "wait", "--for=condition=Ready", "pod/"+podName, "--timeout=60s"))
}

func TestPodsRunAndReachEachOther(t *testing.T) {
	c := up(t, cluster.Options{Nodes: make([]cluster.NodeOptions, 2)})
	runPod(t, c, "first", "node1")
	runPod(t, c, "second", "node2")
	if logs := must(t)(c.Kubectl(t.Context(), "logs", "first")); logs != "booted\n" {
		t.Errorf("kubectl logs prints %q, want the output of the container", logs)
	}
	address := must(t)(c.Kubectl(t.Context(), "get", "pod", "second", "-o", "jsonpath={.status.podIP}"))
	must(t)(c.Kubectl(t.Context(), "exec", "first", "--", "ping", "-c", "1", "-W", "5", address))
	if helm := must(t)(c.Helm(t.Context(), "list", "--all-namespaces", "--short")); helm != "" {
		t.Errorf("helm lists the releases %q in a new cluster, want none", helm)
	}
}

func TestPowerCutLosesMemoryAndKeepsDisk(t *testing.T) {
	hook := filepath.Join(t.TempDir(), "hook")
	if err := os.WriteFile(hook, []byte("#!/bin/sh\nmknod /dev/made-by-hook c 1 3 && echo \"$NODE_NAME $1\" >>/var/lib/boots\n"),
		0o755); err != nil {
		t.Fatal(err)
	}
	c := up(t, cluster.Options{Nodes: []cluster.NodeOptions{{BootHook: []string{hook, "argument"}}}})
	node := c.Nodes()[0]
	runPod(t, c, "survivor", node.Name())
	must(t)(node.Exec(t.Context(), "sh", "-c", "mkdir -p /etc/cdi && touch /etc/cdi/kept /run/lost /usr/kept"))
	bootID := must(t)(node.Exec(t.Context(), "cat", "/proc/sys/kernel/random/boot_id"))

	if err := node.PowerCut(t.Context()); err != nil {
		t.Fatal(err)
	}
	if node.Running() {
		t.Error("the node runs after a power cut")
	}
	if _, err := node.Exec(t.Context(), "true"); err == nil {
		t.Error("a command ran on the node after a power cut")
	}
	if err := node.Boot(t.Context()); err != nil {
		t.Fatal(err)
	}

	if boots := must(t)(node.Exec(t.Context(), "cat", "/var/lib/boots")); boots != "node1 argument\nnode1 argument\n" {
		t.Errorf("the boot hook wrote %q, want its line once for each of two boots", boots)
	}
	must(
		t,
	)(
		node.Exec(
			t.Context(),
			"test",
			"-c",
			"/dev/made-by-hook",
			"-a",
			"-e",
			"/etc/cdi/kept",
			"-a",
			"-e",
			"/usr/kept",
			"-a",
			"!",
			"-e",
			"/run/lost",
		),
	)
	if after := must(t)(node.Exec(t.Context(), "cat", "/proc/sys/kernel/random/boot_id")); after == bootID {
		t.Error("the boot ID is the same after a power cut")
	}
	for _, path := range []string{"/dev/made-by-hook", "/etc/cdi/kept", "/usr/kept"} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s was created on the host, want it on the node only", path)
		}
	}
	eventually(t, "the Pod's container was started again", func() bool {
		out, err := c.Kubectl(
			t.Context(),
			"get",
			"pod",
			"survivor",
			"-o",
			"jsonpath={.status.containerStatuses[0].restartCount} {.status.containerStatuses[0].ready}",
		)
		return err == nil && out == "1 true"
	})
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for !is() {
		select {
		case <-ctx.Done():
			t.Fatalf("not within a minute: %s", what)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func TestContainersSurviveNodeServiceRestart(t *testing.T) {
	c := up(t, cluster.Options{})
	node := c.Nodes()[0]
	runPod(t, c, "steady", node.Name())
	for _, act := range []struct{ verb, service string }{{"restart", "kubelet"}, {"restart", "containerd"}, {"kill", "containerd"},
		{"kill", "kubelet"}} {
		if err := node.Service(t.Context(), act.verb, act.service); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the container can be reached after "+act.verb+" "+act.service, func() bool {
			_, err := c.Kubectl(t.Context(), "exec", "steady", "--", "true")
			return err == nil
		})
	}
	if restarts := must(t)(c.Kubectl(t.Context(), "get", "pod", "steady", "-o",
		"jsonpath={.status.containerStatuses[0].restartCount}")); restarts != "0" {
		t.Errorf("the container was restarted %s times", restarts)
	}
	if err := node.Service(t.Context(), "restart", "sshd"); err == nil || !strings.Contains(err.Error(), "sshd") {
		t.Errorf("restarting a service that the node does not have: error is %v, want one that names it", err)
	}
}

func TestFailedBootHookIsReported(t *testing.T) {
	t.Cleanup(func() {
		if err := cluster.Down(context.Background(), name); err != nil {
			t.Error(err)
		}
		nothingIsLeft(t)
	})
	_, err := cluster.Up(
		t.Context(),
		cluster.Options{Name: name, Nodes: []cluster.NodeOptions{{BootHook: []string{"/bin/sh", "-c", "echo no GPU here; exit 3"}}}},
	)
	if err == nil || !strings.Contains(err.Error(), "boot hook") || !strings.Contains(err.Error(), "exit status 3") {
		t.Fatalf("error is %v", err)
	}
	dirs, err := cluster.LogDirs(name)
	if err != nil {
		t.Fatal(err)
	}
	if output, err := os.ReadFile(filepath.Join(dirs["node1"], "boot-hook.log")); err != nil ||
		!strings.Contains(string(output), "no GPU here") {
		t.Errorf("the log of the boot hook is %q, %v", output, err)
	}
}

func TestDownCleansUpAfterKill(t *testing.T) {
	if _, err := cluster.Build(t.Context(), cluster.Options{}, t.Output()); err != nil {
		t.Fatal(err)
	}
	for _, milliseconds := range []int{20, 100, 300, 700, 1500, 3000} {
		command := exec.Command(os.Args[0])
		command.Env = append(os.Environ(), "CLUSTER_TEST_UP=1")
		if err := command.Start(); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Duration(milliseconds) * time.Millisecond) // not a wait: the moment of the kill is the test's input
		if err := command.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_ = command.Wait()
		if err := cluster.Down(t.Context(), name); err != nil {
			t.Fatalf("killed after %dms: %v", milliseconds, err)
		}
		nothingIsLeft(t)
	}
	if err := cluster.Down(t.Context(), name); err != nil {
		t.Errorf("Down without a cluster: %v", err)
	}
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	others, err := cluster.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if len(others) == 0 && strings.HasPrefix(link.Name, "gpudra") {
			t.Errorf("link %s is left", link.Name)
		}
	}
}

func TestCancelledUpLeavesNothing(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	if _, err := cluster.Up(ctx, cluster.Options{Name: name}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error is %v", err)
	}
	nothingIsLeft(t)
}

func TestUpRefusesExistingCluster(t *testing.T) {
	up(t, cluster.Options{})
	if _, err := cluster.Up(t.Context(), cluster.Options{Name: name}); err == nil || !strings.Contains(err.Error(), name) {
		t.Errorf("error is %v", err)
	}
	if opened, err := cluster.Open(name); err != nil || !opened.Nodes()[0].Running() {
		t.Errorf("the cluster does not run after a second Up: %v", err)
	}
}
