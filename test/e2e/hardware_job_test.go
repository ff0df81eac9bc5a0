package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/clusterharness"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// TestHardwareCheckJob builds the image of the hardware check and runs its Job on a simulated node.
// The image's base is empty here, so the node lends its C library and ldconfig.
func TestHardwareCheckJob(t *testing.T) {
	t.Parallel()
	w := bringUp(t, "e2e-hwcheck", simulator(t).Node(h100, "dgx-h100"))
	archive, job := w.hardwareCheck(t)
	if err := w.LoadImage(t.Context(), archive); err != nil {
		t.Fatal(err)
	}

	pod := &job.Spec.Template.Spec
	pod.NodeName = h100
	check := &pod.Containers[0]
	check.Args = append(check.Args, "--sysfs-root=/simulated/sys", "--proc-root=/simulated/proc", "--scans=5")
	mount := func(name, source, target string) {
		check.VolumeMounts = append(check.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: target, ReadOnly: true})
		pod.Volumes = append(pod.Volumes, corev1.Volume{
			Name: name, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: source}},
		})
	}
	mount("simulated", clusterharness.NodeRoot, "/simulated")
	for _, dir := range []string{"usr", "lib", "lib64", "sbin"} {
		mount(dir, "/"+dir, "/"+dir)
	}
	for i := range pod.Volumes {
		if pod.Volumes[i].Name == "driver-root" {
			pod.Volumes[i].HostPath.Path = clusterharness.NodeRoot + "/driver"
		}
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: job.Namespace, Labels: map[string]string{"pod-security.kubernetes.io/enforce": "privileged"},
	}}
	if _, err := w.Client.CoreV1().Namespaces().Create(t.Context(), namespace, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	jobs := w.Client.BatchV1().Jobs(job.Namespace)
	if _, err := jobs.Create(t.Context(), job, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	report := ""
	eventually(t, 5*time.Minute, "the Job has ended", func() (bool, string) {
		got, err := jobs.Get(t.Context(), job.Name, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		report, _ = w.Kubectl(t.Context(), "-n", job.Namespace, "logs", "job/"+job.Name)
		return got.Status.Succeeded+got.Status.Failed > 0, fmt.Sprintf("%+v\n%s", got.Status, report)
	})

	var found facts.Report
	if err := json.Unmarshal([]byte(w.on(t, h100, "cat", "/var/tmp/hwcheck-report/facts.json")), &found); err != nil {
		t.Fatalf("%v\n%s", err, report)
	}
	if found.Driver == nil || !found.Driver.Simulated || found.NVML == nil || len(found.NVML.GPUs) != 8 {
		t.Errorf("the check found another node: %s", report)
	}
	for _, c := range found.Checks {
		// The simulated CUDA library computes nothing, and a container on a simulated node does not see
		// the driver's parameters.
		simulated := c.Verdict == facts.NotProven &&
			(strings.HasPrefix(c.Detail, "simulated library: ") || strings.HasPrefix(c.Detail, "/proc/driver/nvidia/params: "))
		if c.Verdict != facts.Agreed && c.Verdict != facts.Recorded && !simulated {
			t.Errorf("%+v", c)
		}
	}
	t.Log(report)
}

// hardwareCheck builds the image of the hardware check. It returns the image's archive and the Job
// that comes with the check, which names this image.
func (w *world) hardwareCheck(t *testing.T) (archive string, job *batchv1.Job) {
	t.Helper()
	folder := filepath.Join(w.root, "build", "hwcheck-image")
	script := exec.CommandContext(t.Context(), filepath.Join(w.root, "hack", "hwcheck.sh"), folder)
	if out, err := script.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	manifest, err := os.ReadFile(filepath.Join(folder, "job.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	job = &batchv1.Job{}
	if err := yaml.UnmarshalStrict(manifest, job); err != nil {
		t.Fatal(err)
	}
	const image = "localhost/hwcheck:test"
	job.Spec.Template.Spec.Containers[0].Image = image
	archive, err = cluster.BuildImage(t.Context(), cluster.ImageBuild{
		Dockerfile: filepath.Join(folder, "Dockerfile"), Tag: image, Arguments: map[string]string{"BASE": cluster.EmptyImage},
	}, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	return archive, job
}
