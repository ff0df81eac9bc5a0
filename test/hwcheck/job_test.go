package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
)

// readJob returns the container of the Job in test/hardware and how long the Job may run.
func readJob(t *testing.T) (corev1.Container, time.Duration) {
	t.Helper()
	text, err := os.ReadFile("../hardware/job.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var job batchv1.Job
	if err := yaml.UnmarshalStrict(text, &job); err != nil {
		t.Fatal(err)
	}
	spec := job.Spec.Template.Spec
	if len(spec.Containers) != 1 || job.Spec.ActiveDeadlineSeconds == nil {
		t.Fatalf("%+v", job.Spec)
	}
	volumes := map[string]bool{}
	for _, v := range spec.Volumes {
		volumes[v.Name] = v.HostPath != nil
	}
	for _, m := range spec.Containers[0].VolumeMounts {
		if !volumes[m.Name] {
			t.Errorf("the mount at %s has no volume of the host", m.MountPath)
		}
	}
	return spec.Containers[0], time.Duration(*job.Spec.ActiveDeadlineSeconds) * time.Second
}

func TestJobCallsProgramOfImage(t *testing.T) {
	container, deadline := readJob(t)
	o, err := parse(container.Args, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	mounted := map[string]bool{}
	for _, m := range container.VolumeMounts {
		mounted[m.MountPath] = !m.ReadOnly
	}
	if writable, ok := mounted[o.driverRoot]; !ok || writable || !mounted[o.out] || !mounted["/dev"] {
		t.Errorf("with %v the container has these mounts, writable or not: %v", container.Args, mounted)
	}
	// Nine minutes are for the check. The rest is for the image and the start.
	if deadline < 9*time.Minute+30*time.Second || o.limit > 9*time.Minute {
		t.Errorf("the Job ends after %s, the checks after %s", deadline, o.limit)
	}
	image, err := os.ReadFile("../hardware/Dockerfile")
	if err != nil || !strings.Contains(string(image), "\nCOPY . /hwcheck\nENTRYPOINT [\"/hwcheck/hwcheck\"]\n") || len(container.Command) > 0 {
		t.Errorf("the image's program is not that of the folder (%v), command %v:\n%s", err, container.Command, image)
	}
}

// hwcheck runs with the Job's arguments and mounts in the namespaces of a privileged container.
func TestCheckRunsAsJob(t *testing.T) {
	m := newMachine(t, "dgx-h100", layout.Host, nil)
	container, _ := readJob(t)
	m.setup = append(m.setup,
		"mkdir /usr/local/driver-root", // the test makes no folder in /
		"mount --bind "+filepath.Join(m.root, "driver")+" /usr/local/driver-root",
		"mount -o remount,bind,ro /usr/local/driver-root",
	)
	var args []string
	for _, arg := range container.Args {
		args = append(args, strings.Replace(arg, "=/driver-root", "=/usr/local/driver-root", 1))
	}
	namespaces := []string{"/usr/bin/unshare", "--pid", "--fork", "--mount-proc", "--ipc", "--uts", "--net", "--cgroup", m.hwcheck()}
	r := m.check(append(append(namespaces, m.in()...), args...)...)
	r.wantVerdicts(t, all(facts.Agreed, driverCheck, nvmlCheck, inventoryCheck, specCheck, noneCheck, oneCheck, allCheck, tableCheck,
		timeSliceCheck, gettersCheck, librariesCheck, attachCheck, restCheck, scansCheck, endCheck))
	if r.code != exitNotProven || r.facts.Driver == nil || r.facts.Driver.Root != "/usr/local/driver-root" {
		t.Errorf("exit code %d, %+v", r.code, r.facts.Driver)
	}
}
