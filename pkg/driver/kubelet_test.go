package driver

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
)

func nodeThatIs(ready corev1.ConditionStatus) *corev1.Node {
	return &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}}}
}

func kubeletCalls(t *testing.T, k *kubeletLife, method string) {
	t.Helper()
	served := false
	_, err := k.intercept(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: method}, func(context.Context, any) (any, error) { served = true; return nil, nil })
	if !served || err != nil {
		t.Errorf("%s: served %v, %v", method, served, err)
	}
}

func TestAKubeletIsAtWorkSinceItRegisteredThePluginLast(t *testing.T) {
	const registration, other = "/pluginregistration.Registration/NotifyRegistrationStatus", "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
	synctest.Test(t, func(t *testing.T) {
		var k kubeletLife
		is := func(want bool, when string) {
			t.Helper()
			if got := k.AtWork(time.Minute); got != want {
				t.Errorf("%s: at work for a minute: %v", when, got)
			}
		}
		k.See(nodeThatIs(corev1.ConditionTrue))
		kubeletCalls(t, &k, other)
		<-time.After(time.Hour)
		is(false, "it has not registered the plugin")
		kubeletCalls(t, &k, registration)
		<-time.After(59 * time.Second)
		is(false, "too soon")
		<-time.After(time.Second)
		is(true, "a minute after it has")
		k.See(nodeThatIs(corev1.ConditionUnknown))
		is(false, "nothing is heard of it")
		k.See(nodeThatIs(corev1.ConditionTrue))
		is(true, "it is heard of again")
		kubeletCalls(t, &k, registration)
		is(false, "it has started again")
		k.See(&corev1.Node{})
		<-time.After(time.Hour)
		is(false, "the Node says nothing")
	})
}
