package e2e

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A soak test kills the plugin and the kubelet at least this often, however fast the machine is.
const (
	leastKills        = 2
	leastKubeletKills = 1
)

// soakRules are sharing rules: claims share one GPU through MPS with limits, one by time slices,
// and one in the form of partitions.
var soakRules = []string{
	fractions(fractioned, ""), plainShares(timeSliced, "", 8), fractions(cutShares, "1g.10gb"), plainShares(cutShares, "2g.20gb", 2),
}

// TestSoak runs Pods with devices of every kind while the plugin and the kubelet are killed again
// and again. Each Pod must have its claim's devices, and in the end the node must be as before. The
// test takes long and runs only by `make soak`.
func TestSoak(t *testing.T) {
	if os.Getenv("SOAK_PODS") == "" {
		t.Skip("SKIPPED: thousands of Pods come and go while plugin and kubelet are killed, with make soak")
	}
	sim := simulator(t)
	w := bringUp(t, "e2e-soak", sim.Node(h100, "dgx-h100"))
	w.needSMI(t)
	w.smi(t, h100, "-pm", "1")
	w.install(t, "--set-json", sharesValue(soakRules...))
	w.offersShapes(t, h100, 8, 200)
	w.supervisor(t)
	t.Run("Pods come and go while plugin and kubelet are killed", w.testSoak)
}

func (w *world) testSoak(t *testing.T) {
	pods := int(fromEnvironment(t, "SOAK_PODS", 0))
	u := w.tenant(t)
	before, supervisor := w.bareNode(t), w.supervisorProcess(t)
	memory, files := w.holds(t, supervisor)

	s := u.soak()
	s.churn(pods, killer{
		plugin: time.NewTicker(seconds(t, "SOAK_KILL_PLUGIN", 20)), kubelet: time.NewTicker(seconds(t, "SOAK_KILL_KUBELET", 120)),
	})
	s.neverTwice()
	// From here on the test kills nothing, because it compares the memory, open files and goroutines
	// of one plugin process before and after more claims.
	s.churn(2*len(soakKinds), killer{})
	was := w.processes(t)
	s.churn(max(pods/20, len(soakKinds)), killer{})
	eventually(t, 30*time.Second, "the plugin holds no more than before these Pods", func() (bool, string) {
		now := w.processes(t)
		return now.files <= was.files+5 && now.goroutines <= was.goroutines+5 &&
				now.memory <= was.memory+16<<20, fmt.Sprintf(
				"%s; before: %s",
				now,
				was,
			)
	})
	s.report()

	s.nothingIsLeft()
	s.allGPUs()
	s.nothingIsLeft()
	w.isAsBefore(t, before)
	eventually(t, 30*time.Second, "the supervisor of MPS daemons holds no more than before", func() (bool, string) {
		nowMemory, nowFiles := w.holds(t, supervisor)
		return nowMemory <= memory+16<<20 &&
				nowFiles <= files+5, fmt.Sprintf(
				"%d bytes and %d files, before %d and %d",
				nowMemory,
				nowFiles,
				memory,
				files,
			)
	})
	if ended := w.instance(t, h100).Status.ContainerStatuses[0].RestartCount; int(ended) > s.kills {
		t.Errorf("the plugin was killed %d times but restarted %d times", s.kills, ended)
	}
	t.Logf("plugin at the end: %s", w.processes(t))
}

func seconds(t *testing.T, name string, otherwise uint64) time.Duration {
	t.Helper()
	return time.Duration(fromEnvironment(t, name, otherwise)) * time.Second
}

// killer has two tickers. At each tick churn kills the plugin or the kubelet. If the tickers are
// nil, churn kills nothing.
type killer struct{ plugin, kubelet *time.Ticker }

func (k killer) ticks() (plugin, kubelet <-chan time.Time) {
	if k.plugin == nil {
		return nil, nil
	}
	return k.plugin.C, k.kubelet.C
}

// churn runs Pods of all kinds until the given number has ended. Meanwhile it kills the plugin and
// the kubelet at the ticks of k.
func (s *soak) churn(pods int, k killer) {
	s.t.Helper()
	killPlugin, killKubelet := k.ticks()
	s.start(pods, killPlugin != nil)
	defer s.stop()
	progress := time.NewTicker(15 * time.Second)
	defer progress.Stop()
	// goesOn says, for the plugin and the kubelet, whether a Pod has ended since its last kill. Only
	// then it is killed again, because otherwise no Pod would ever end on a slow machine.
	goesOn := map[string]bool{}
	for users := soakUsers; users > 0; {
		select {
		case l := <-s.ended:
			s.check(l)
			goesOn["plugin"], goesOn["kubelet"] = true, true
		case <-s.left:
			users--
		case <-killPlugin:
			if goesOn["plugin"] {
				s.killPlugin()
			}
			goesOn["plugin"] = false
		case <-killKubelet:
			if goesOn["kubelet"] {
				s.killKubelet()
			}
			goesOn["kubelet"] = false
		case <-progress.C:
			s.t.Log(s.progress())
		}
		if s.kills >= leastKills && s.kubeletKills >= leastKubeletKills {
			s.killedEnough.Store(true)
		}
		if s.t.Failed() {
			s.t.FailNow()
		}
	}
	for len(s.ended) > 0 {
		s.check(<-s.ended)
	}
	s.t.Log(s.progress())
}

// killPlugin ends the plugin by SIGKILL. It first saves the metrics, which the kill resets.
func (s *soak) killPlugin() {
	s.t.Helper()
	process := mainProcess(s.t, "GPU_DRA_POD_UID", string(s.plugin.UID))
	s.count()
	if err := process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		s.t.Fatal(err)
	}
	s.kills++
}

func (s *soak) killKubelet() {
	s.t.Helper()
	if err := s.node(s.t, h100).Service(s.t.Context(), "kill", "kubelet"); err != nil {
		s.t.Fatal(err)
	}
	s.kubeletKills++
}

// nothingIsLeft waits until the cluster has no claim, and the node has no partition and no MPS
// daemon, checkpoint record, CDI spec or lock of a claim.
func (s *soak) nothingIsLeft() {
	s.t.Helper()
	eventually(s.t, 60*time.Second, "no claim is left", func() (bool, string) {
		claims, err := s.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(s.t.Context(), metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		var left []string
		for _, c := range claims.Items {
			left = append(left, fmt.Sprint(c.Name, c.Finalizers, c.DeletionTimestamp, c.Status.ReservedFor))
		}
		return len(left) == 0, strings.Join(left, "\n")
	})
	s.uncut(s.t, h100)
	s.unshared(s.t)
	s.clean(s.t, h100)
}

// allGPUs runs one Pod with all GPUs whole. GPUs that were partitioned must leave MIG mode for it.
func (s *soak) allGPUs() {
	s.t.Helper()
	s.gpus(8)
	s.pod("all", fromTemplate("gpu", gpusTemplate(8)))
	s.running("all")
	s.sees("all", "", s.allocated("all", "gpu"))
	s.endPods(s.t, s.namespace)
}
