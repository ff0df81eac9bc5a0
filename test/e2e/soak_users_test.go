package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

const (
	// soakUsers is the number of users, each of whom has one Pod at a time.
	soakUsers = 28
	// stuckAfter is the time after which a Pod counts as stuck. While a Pod waits for a node, the time
	// starts again whenever another Pod ends.
	stuckAfter = 10 * time.Minute
)

// soakKind is a kind of Pods, which use one of these claims. Every fourth Pod is of this kind.
type soakKind struct {
	name   string
	claims []string
	// client is true if the Pods' programs are clients of MPS.
	client bool
}

var soakKinds = []soakKind{
	{name: "whole", claims: []string{oneGPU}},
	{
		name:   "mig",
		claims: []string{soakPartitions(1, "1g.10gb"), soakPartitions(1, "2g.20gb"), soakPartitions(2, "1g.10gb"), soakPartitions(1, "3g.40gb")},
	},
	{name: "slices", claims: []string{
		configured(slicing("Long")),
		shared("shared.gpu.nvidia.com", timeSliced, "", slicing("Short")),
		shared("shared.gpu.nvidia.com", timeSliced, "", ""),
		ofProfile("2g.20gb", shared("shared.gpu.nvidia.com", cutShares, "", "")),
	}},
	{name: "mps", client: true, claims: []string{
		configured(gpuConfig(someMPS)),
		shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 9Gi}}", ""),
		shared("shared.gpu.nvidia.com", fractioned, "capacity: {requests: {memory: 4Gi, cores: 10}}", ""),
		ofProfile("1g.10gb", shared("shared.gpu.nvidia.com", cutShares, "capacity: {requests: {memory: 2Gi}}", "")),
	}},
}

// soakPartitions returns a claim for count partitions of a profile, on one of two GPUs. Partitions
// on all GPUs would leave few whole ones.
func soakPartitions(count int, profile string) string {
	const cards = `device.attributes["resource.kubernetes.io"].pciBusID in ["` + cutShares + `", "` + whole1 + `"]`
	return strings.Replace(partitions(count, profile), "selectors: [", "selectors: [{cel: {expression: '"+cards+"'}}, ", 1)
}

// configured returns a claim for any GPU, with these opaque parameters.
func configured(parameters string) string {
	return oneGPU + "\nconfig: [{requests: [gpu], opaque: {driver: gpu.nvidia.com, parameters: " + parameters + "}}]"
}

// soak is the state of the soak test: its users, each of whom creates one Pod after another, and
// the results of these Pods.
type soak struct {
	tenant
	seed   uint64
	known  map[string]resourceapi.Device // the published devices when the soak test began
	plugin corev1.Pod
	pods   corelisters.PodNamespaceLister
	claims sync.Map // the newest state of a claim that was allocated, by the name of its Pod

	round        int
	atMost       time.Duration
	cancel       context.CancelFunc
	workers      sync.WaitGroup
	ended        chan life
	left         chan struct{}
	lives        atomic.Int64 // the number of Pods that have ended
	killedEnough atomic.Bool

	kills, kubeletKills int
	done                map[string]int
	starts              map[string][]time.Duration
	uses                []use
	counted             map[string]float64
	began               time.Time
}

// life is what is known of a Pod after its end. err is nil if the Pod ended and was deleted without
// an error.
type life struct {
	kind  soakKind
	pod   *corev1.Pod
	claim *resourceapi.ResourceClaim
	err   error
}

func (u tenant) soak() *soak {
	u.t.Helper()
	s := &soak{
		tenant: u, seed: fromEnvironment(u.t, "SOAK_SEED", uint64(time.Now().UnixNano())), atMost: 60 * seconds(u.t, "SOAK_MINUTES", 24*60),
		known: u.devices(u.t, h100), plugin: u.instance(u.t, h100),
		ended: make(chan life, 1024), left: make(chan struct{}, soakUsers),
		done: map[string]int{}, starts: map[string][]time.Duration{}, counted: map[string]float64{}, began: time.Now(),
	}
	u.t.Logf("to create the same claims again: SOAK_SEED=%d", s.seed)
	for _, kind := range soakKinds {
		for i, claim := range kind.claims {
			u.template(fmt.Sprint(kind.name, i), claim)
		}
	}
	factory := informers.NewSharedInformerFactoryWithOptions(u.Client, 0, informers.WithNamespace(u.namespace))
	s.pods = factory.Core().V1().Pods().Lister().Pods(u.namespace)
	// keep stores every allocated claim, because a claim is deleted once its Pod has ended.
	keep := func(object any) {
		if claim, ok := object.(*resourceapi.ResourceClaim); ok && claim.Status.Allocation != nil && len(claim.OwnerReferences) == 1 {
			s.claims.Store(claim.OwnerReferences[0].Name, claim)
		}
	}
	handler := cache.ResourceEventHandlerFuncs{AddFunc: keep, UpdateFunc: func(_, now any) { keep(now) }}
	if _, err := factory.Resource().V1().ResourceClaims().Informer().AddEventHandler(handler); err != nil {
		u.t.Fatal(err)
	}
	factory.Core().V1().Pods().Informer()
	factory.StartWithContext(u.t.Context())
	factory.WaitForCacheSyncWithContext(u.t.Context())
	return s
}

// start lets all users begin. Their Pods are of the kinds one after another. The users end when
// together they have created this number of Pods or at the deadline, but if kills is true not
// before there were enough kills.
func (s *soak) start(pods int, kills bool) {
	ctx, cancel := context.WithCancel(s.t.Context())
	s.cancel = cancel
	s.round++
	begun := &atomic.Int64{}
	late := time.Now().Add(s.atMost)
	for range soakUsers {
		s.workers.Go(func() {
			defer func() { s.left <- struct{}{} }()
			for ctx.Err() == nil {
				n := int(begun.Add(1)) - 1
				if (n >= pods || time.Now().After(late)) && (!kills || s.killedEnough.Load()) {
					return
				}
				kind, random := soakKinds[n%len(soakKinds)], rand.New(rand.NewPCG(s.seed, uint64(s.round)<<32|uint64(n)))
				s.ended <- s.live(ctx, kind, fmt.Sprintf("%s-%d-%d", kind.name, s.round, n), random)
			}
		})
	}
}

func (s *soak) stop() {
	s.cancel()
	s.workers.Wait()
}

// live creates a Pod, waits until it has ended, and deletes it. random selects the claim and the
// running time.
func (s *soak) live(ctx context.Context, kind soakKind, name string, random *rand.Rand) life {
	l := life{kind: kind}
	pods := s.Client.CoreV1().Pods(s.namespace)
	template := fmt.Sprint(kind.name, random.IntN(len(kind.claims)))
	rest := fmt.Sprintf("0.%d", random.IntN(10))
	if _, l.err = pods.Create(ctx, soakPod(name, template, rest), metav1.CreateOptions{}); l.err != nil {
		return l
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for since, others := time.Now(), s.lives.Load(); ; {
		pod, err := s.pods.Get(name)
		if err != nil && !apierrors.IsNotFound(err) {
			l.err = err
			return l
		}
		if err == nil {
			l.pod = pod
		}
		claim, stored := s.claims.Load(name)
		if stored && err == nil && (pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed) {
			s.claims.Delete(name)
			l.claim = claim.(*resourceapi.ResourceClaim)
			s.lives.Add(1)
			break
		}
		if now := s.lives.Load(); now != others && (err != nil || pod.Spec.NodeName == "") {
			since, others = time.Now(), now
		}
		if time.Since(since) > stuckAfter {
			l.err = fmt.Errorf("Pod %s has not ended after %s", name, stuckAfter)
			return l
		}
		select {
		case <-ctx.Done():
			l.err = ctx.Err()
			return l
		case <-tick.C:
		}
	}
	l.err = pods.Delete(ctx, name, metav1.DeleteOptions{})
	return l
}

// soakScript is what a Pod's container runs. It prints the container's devices twice, with the
// times. After a failure it prints no end time, and the soak test then fails.
const soakScript = `
exec >/dev/termination-log 2>&1
echo from $(cut -d' ' -f1 /proc/uptime)
nvidia-smi -L && nvidia-cuda-mps-control nvmlsim-cuda && sleep "$1" && nvidia-smi -L && echo to $(cut -d' ' -f1 /proc/uptime)
exit 0`

func soakPod(name, template, rest string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			// If the kubelet is killed while it starts a container, that start fails. The Pod would fail too
			// if the kubelet did not retry.
			RestartPolicy: corev1.RestartPolicyOnFailure, TerminationGracePeriodSeconds: ptr.To(int64(1)),
			ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}},
			Containers: []corev1.Container{{
				Name: "main", Image: cluster.TestImage, ImagePullPolicy: corev1.PullNever,
				Command:   []string{"sh", "-c", soakScript, "sh", rest},
				Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}},
			}},
		},
	}
}
