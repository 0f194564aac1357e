"""The testbed in containers, on a real engine. Where there is none these tests skip and say why; with
PRFAAS_CI=1 a missing engine, or a missing base image, is a failure.
"""
