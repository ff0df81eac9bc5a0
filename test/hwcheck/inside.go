package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// These are arguments of our CUDA program. Each is the part of one container among several.
const (
	mpsDaemon    = "mps-daemon"    // an MPS daemon, until the other containers have ended
	mpsClient    = "mps-client"    // computes as a client, and stays for seconds
	mpsMany      = "mps-many"      // more and more clients, until one is refused
	mpsNeighbour = "mps-neighbour" // computes before and after another client's fault
	mpsFaulty    = "mps-faulty"    // writes outside its memory
	ipcExport    = "ipc-export"    // shares memory by CUDA IPC
	ipcImport    = "ipc-import"    // reads that memory
)

// cudaArguments are the arguments that hwcheck may give to our CUDA program.
var cudaArguments = []string{mpsArgument, mpsDaemon, mpsClient, mpsMany, mpsNeighbour, mpsFaulty, ipcExport, ipcImport}

const kernelParameters = "/proc/driver/nvidia/params"

// graphicsFiles are the folders in which the loaders of Vulkan, EGL and GBM search, and the device
// nodes.
var graphicsFiles = []string{
	"/etc/vulkan", "/usr/share/vulkan", "/etc/glvnd", "/usr/share/glvnd", "/etc/egl", "/usr/share/egl", "/usr/share/nvidia", "/etc/OpenCL",
	"/dev",
}

// looked are the paths that hwcheck describes in a container.
var looked = append([]string{kernelParameters}, graphicsFiles...)

// change changes a container.
type change func(bundle string, config *oci.Spec) error

func asUser(_ string, config *oci.Spec) error {
	config.Process.User = oci.User{UID: 1000, GID: 1000}
	return nil
}

func readOnlyRoot(_ string, config *oci.Spec) error {
	config.Root.Readonly = true
	return nil
}

// inUserNamespace gives the container a user namespace whose users have no rights outside, as a Pod
// with hostUsers: false has. Its root file system belongs to that namespace's root.
func inUserNamespace(bundle string, config *oci.Spec) error {
	const first = 1 << 20
	config.Linux.Namespaces = append(config.Linux.Namespaces, oci.LinuxNamespace{Type: oci.UserNamespace})
	config.Linux.UIDMappings = []oci.LinuxIDMapping{{ContainerID: 0, HostID: first, Size: 1 << 16}}
	config.Linux.GIDMappings = config.Linux.UIDMappings
	return filepath.WalkDir(filepath.Join(bundle, "rootfs"), func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, first, first)
	})
}

// inHostNamespaces makes the container share these namespaces with the host.
func inHostNamespaces(types ...oci.LinuxNamespaceType) change {
	return func(_ string, config *oci.Spec) error {
		config.Linux.Namespaces = slices.DeleteFunc(config.Linux.Namespaces, func(n oci.LinuxNamespace) bool {
			return slices.Contains(types, n.Type)
		})
		return nil
	}
}

// part is one container of a question: the argument of our CUDA program, and what is special.
type part struct {
	argument string
	change   change
}

// scene is a question to several containers at the same time.
type scene struct {
	name  string
	parts []part
	judge func(answer string) (facts.Verdict, string)
}

// containerQuestions ask what containers with one GPU have and may do.
func (s *visit) containerQuestions(c *containers, given offer) []question {
	devices, err := c.specs.devices([]offer{given})
	if err != nil {
		return nil // checkSpecs reported it
	}
	look := func(name string, judge func(string) (facts.Verdict, string), paths ...string) question {
		return question{name: name, judge: judge, ask: func(ctx context.Context) (string, error) {
			result := c.run(ctx, guest{host: c.programs.self, inside: filepath.Join("/usr/bin", itself), copied: true, onlyByRunc: true},
				devices, append([]string{stageLook}, paths...)...)
			return result.stdout + result.stderr, result.err
		}}
	}
	questions := []question{
		look("the driver's parameters are read-only in a container", judgeParameters, kernelParameters),
		look("the files for graphics and the device nodes in a container", nil, graphicsFiles...),
	}
	if s.ctk != "" {
		questions = append(questions, s.toolkitQuestion(c.specs))
	}
	if !s.cuda {
		return questions
	}
	for _, x := range []struct {
		name   string
		change change
	}{
		{"CUDA computes as user 1000", asUser},
		{"CUDA computes with a read-only root file system", readOnlyRoot},
		{"CUDA computes in a user namespace", inUserNamespace},
	} {
		questions = append(questions, question{name: x.name, ask: func(ctx context.Context) (string, error) {
			return c.together(ctx, devices, part{"", x.change})
		}, judge: func(answer string) (facts.Verdict, string) {
			var r facts.CUDAResult
			if err := json.Unmarshal([]byte(lastLines(answer, 1)), &r); err != nil {
				return facts.Failed, fmt.Sprintf("%v: %s", err, lastLines(answer, 2))
			}
			return s.verdictCUDA(c, given, r)
		}})
	}
	hostPID, host := inHostNamespaces(oci.PIDNamespace), inHostNamespaces(oci.PIDNamespace, oci.IPCNamespace)
	scenes := []scene{
		// The supervisor's Pod has the host's PID namespace, because a daemon wants to see its clients.
		{"MPS clients in other containers than their daemon", []part{{mpsDaemon, hostPID}, {mpsClient, nil}, {mpsClient, nil}}, s.judgeClients},
		{"MPS clients of a daemon with a PID namespace of its own", []part{{mpsDaemon, nil}, {mpsClient, nil}, {mpsClient, nil}}, nil},
		{"CUDA IPC between containers with namespaces of their own", []part{{ipcExport, nil}, {ipcImport, nil}}, nil},
		{"CUDA IPC between containers with the host's PID and IPC namespaces", []part{{ipcExport, host}, {ipcImport, host}}, nil},
		{"how many MPS clients a daemon takes", []part{{mpsDaemon, hostPID}, {mpsMany, nil}}, nil},
	}
	if s.fault {
		scenes = append(scenes, scene{
			"what an MPS client's fault does to its neighbour", []part{{mpsDaemon, hostPID}, {mpsNeighbour, nil}, {mpsFaulty, nil}}, nil,
		})
	}
	for _, x := range scenes {
		questions = append(questions, question{name: x.name, judge: x.judge, lines: len(x.parts), ask: func(ctx context.Context) (string, error) {
			return c.together(ctx, devices, x.parts...)
		}})
	}
	return questions
}

// judgeClients accepts two clients that computed at the same time.
func (s *visit) judgeClients(answer string) (facts.Verdict, string) {
	detail := lastLines(answer, 3)
	switch {
	case s.report.Driver.Simulated:
		return facts.NotProven, "simulated library: " + detail
	case strings.Count(answer, `"step":"done","error":0`) == 2 && strings.Contains(answer, `"clients":2`):
		return facts.Agreed, detail
	}
	return facts.Differed, detail
}

// judgeParameters accepts parameters that a container's root user can't write. The hook of the CDI
// specification puts a file of its own there. This container has no capabilities, but others do, so
// the mount counts.
func judgeParameters(answer string) (facts.Verdict, string) {
	switch {
	case strings.Contains(answer, "no such file"):
		return facts.NotProven, lastLines(answer, 1)
	case strings.Contains(answer, writable) || !strings.Contains(answer, readOnly):
		return facts.Differed, lastLines(answer, 1)
	}
	return facts.Agreed, lastLines(answer, 1)
}

// together runs our CUDA program once for each part, in containers that exist at the same time and
// share /shared and /dev/shm. The first part ends after the others have ended. The answer has the
// errors that they printed, and then a line of output for each.
func (c *containers) together(ctx context.Context, devices []string, parts ...part) (string, error) {
	shared := filepath.Join(c.work, fmt.Sprintf("shared-%d", c.count.Add(1)))
	for _, folder := range []string{shared, filepath.Join(shared, "shm")} {
		if err := errors.Join(os.MkdirAll(folder, 0o700), os.Chmod(folder, 0o1777)); err != nil {
			return "", err
		}
	}
	outcomes := make([]outcome, len(parts))
	run := func(i int) {
		p := guest{host: c.programs.path(cudaCheck), inside: filepath.Join("/usr/bin", cudaCheck), copied: true, onlyByRunc: true}
		p.change = func(bundle string, config *oci.Spec) error {
			for at, from := range map[string]string{"/shared": shared, "/dev/shm": filepath.Join(shared, "shm")} {
				config.Mounts = append(config.Mounts, oci.Mount{Destination: at, Type: "bind", Source: from, Options: []string{"rbind", "rw"}})
			}
			config.Process.Cwd = "/shared"
			if parts[i].change == nil {
				return nil
			}
			return parts[i].change(bundle, config)
		}
		outcomes[i] = c.run(ctx, p, devices, slices.DeleteFunc([]string{parts[i].argument}, func(a string) bool { return a == "" })...)
	}
	var first, others sync.WaitGroup
	first.Go(func() { run(0) })
	for i := 1; i < len(parts); i++ {
		others.Go(func() { run(i) })
	}
	others.Wait()
	ended := os.WriteFile(filepath.Join(shared, "end"), nil, 0o600)
	first.Wait()
	answer := &strings.Builder{}
	failed := []error{ended}
	for _, o := range outcomes {
		answer.WriteString(o.stderr)
		failed = append(failed, o.err)
	}
	for i, o := range outcomes {
		if len(parts) > 1 {
			fmt.Fprint(answer, parts[i].argument, ": ")
		}
		fmt.Fprintln(answer, strings.TrimSpace(o.stdout))
	}
	return answer.String(), errors.Join(failed...)
}

// toolkitQuestion compares the CDI specification of NVIDIA's nvidia-ctk with the plugin's. The
// answer has what only one of them has.
func (s *visit) toolkitQuestion(ours *specSet) question {
	return question{name: "nvidia-ctk generates the plugin's CDI specification", ask: func(ctx context.Context) (string, error) {
		args := []string{"cdi", "generate", "--format=json", "--driver-root=" + s.report.Driver.Root, "--dev-root=" + s.report.Driver.DevRoot,
			"--nvidia-cdi-hook-path=" + s.programs.path(hook)}
		if err := checkPermitted(nvidiaCTK, args); err != nil {
			return "", err
		}
		result := start(ctx, command{argv: append([]string{s.programs.self, stageWithoutCapabilities, s.ctk}, args...)})
		if result.err != nil {
			return result.stdout, errors.New(lastLines(result.summary(), 3))
		}
		theirs := specs.Spec{}
		if err := json.Unmarshal([]byte(result.stdout), &theirs); err != nil {
			return result.stdout, err
		}
		a, b := editLines(ours.base, ours.claim), editLines(theirs)
		onlyOurs, onlyTheirs := without(a, b), without(b, a)
		return fmt.Sprintf("%s\nonly the plugin's:\n%s\nonly nvidia-ctk's:\n%s\n"+
			"%d lines are in both, %d only in the plugin's, %d only in nvidia-ctk's",
			result.stdout, strings.Join(onlyOurs, "\n"), strings.Join(onlyTheirs, "\n"), len(a)-len(onlyOurs), len(onlyOurs), len(onlyTheirs)), nil
	}}
}

// editLines has one line for each edit of the specifications and all their devices, sorted. It
// leaves the permissions of device nodes out: nvidia-ctk lets containers create them, too.
func editLines(all ...specs.Spec) []string {
	var lines []string
	add := func(e specs.ContainerEdits) {
		for _, env := range e.Env {
			lines = append(lines, "env "+env)
		}
		for _, m := range e.Mounts {
			lines = append(lines, fmt.Sprintf("mount %s from %s (%s)", m.ContainerPath, m.HostPath, strings.Join(m.Options, ",")))
		}
		for _, n := range e.DeviceNodes {
			lines = append(lines, fmt.Sprintf("device %s from %s", n.Path, hostPath(n)))
		}
		for _, h := range e.Hooks {
			lines = append(lines, fmt.Sprintf("hook %s %s", h.HookName, strings.Join(h.Args, " ")))
		}
		for _, gid := range e.AdditionalGIDs {
			lines = append(lines, fmt.Sprintf("group %d", gid))
		}
	}
	for _, spec := range all {
		add(spec.ContainerEdits)
		for _, d := range spec.Devices {
			add(d.ContainerEdits)
		}
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}
